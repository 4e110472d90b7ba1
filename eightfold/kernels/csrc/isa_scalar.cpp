#include "target.h"
#include "vec_scalar.h"
#include "table.h"
namespace eightfold {
const Kernels kScalarKernels = make_table("scalar");
}
