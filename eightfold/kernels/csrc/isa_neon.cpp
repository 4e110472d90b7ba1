#if defined(__aarch64__)
#include "target.h"
#include "vec_neon.h"
#include "table.h"
namespace eightfold {
const Kernels kNeonKernels = make_table("neon");
}
#endif
