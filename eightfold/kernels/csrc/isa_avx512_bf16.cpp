#if defined(__x86_64__)
#include "target.h"
EIGHTFOLD_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")
#define EIGHTFOLD_AVX512_BF16
#include "vec_avx512.h"
#include "table.h"
namespace eightfold {
const Kernels kAvx512Bf16Kernels = make_table("avx512_bf16");
}
EIGHTFOLD_TARGET_END
#endif
