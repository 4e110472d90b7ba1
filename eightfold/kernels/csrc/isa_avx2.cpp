#if defined(__x86_64__)
#include "target.h"
EIGHTFOLD_TARGET("avx2,fma,f16c")
#include "vec_avx2.h"
#include "table.h"
namespace eightfold {
const Kernels kAvx2Kernels = make_table("avx2");
}
EIGHTFOLD_TARGET_END
#endif
