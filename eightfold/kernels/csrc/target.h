// EIGHTFOLD_TARGET(isa) ... EIGHTFOLD_TARGET_END: functions between them may use these instructions. In place of compiler flags
// for single files, which setuptools does not have. Library headers come first, outside the region: their inline functions are
// shared with the rest of the program and must run anywhere.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels.h"
#include "parallel.h"

#define EIGHTFOLD_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define EIGHTFOLD_TARGET(isa) \
  EIGHTFOLD_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define EIGHTFOLD_TARGET_END EIGHTFOLD_PRAGMA(clang attribute pop)
#else
#define EIGHTFOLD_TARGET(isa) EIGHTFOLD_PRAGMA(GCC push_options) EIGHTFOLD_PRAGMA(GCC target(isa))
#define EIGHTFOLD_TARGET_END EIGHTFOLD_PRAGMA(GCC pop_options)
#endif
