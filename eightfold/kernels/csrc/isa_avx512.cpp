#if defined(__x86_64__)
#include "target.h"
EIGHTFOLD_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#include "vec_avx512.h"
#include "table.h"
namespace eightfold {
const Kernels kAvx512Kernels = make_table("avx512");
}
EIGHTFOLD_TARGET_END
#endif
