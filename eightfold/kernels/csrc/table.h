// Compiles every kernel for the instruction set whose vec_*.h was included before.
#pragma once

#include "attention.h"
#include "fused.h"
#include "linear.h"

namespace eightfold {
namespace {

constexpr Kernels make_table(const char* name) { return {name, linear, attention, norm, rotary, silu_and_mul}; }

}  // namespace
}  // namespace eightfold
