// The Python side: a module of the stable ABI (one wheel for every Python from 3.11), without torch's headers. Tensors arrive as
// addresses; shapes and dtypes were checked by cpu.py. Calls are METH_FASTCALL: at two hundred calls a token their cost counts.
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <atomic>
#include <cstring>

#include "kernels.h"
#include "parallel.h"

namespace eightfold {
namespace {

struct InstructionSet {
  const char* name;
  const Kernels* kernels;
  bool available;
};

// Best first.
const InstructionSet* instruction_sets(int* count) {
#if defined(__x86_64__)
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  static const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  static const bool avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  static const InstructionSet sets[] = {{"avx512_bf16", &kAvx512Bf16Kernels, avx512_bf16},
                                        {"avx512", &kAvx512Kernels, avx512},
                                        {"avx2", &kAvx2Kernels, avx2},
                                        {"scalar", &kScalarKernels, true}};
#elif defined(__aarch64__)
  static const InstructionSet sets[] = {{"neon", &kNeonKernels, true}, {"scalar", &kScalarKernels, true}};
#else
  static const InstructionSet sets[] = {{"scalar", &kScalarKernels, true}};
#endif
  *count = sizeof sets / sizeof sets[0];
  return sets;
}

const Kernels* best_kernels() {
  int count;
  const InstructionSet* sets = instruction_sets(&count);
  while (!sets->available) ++sets;
  return sets->kernels;
}

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> kernels{best_kernels()};
  return kernels;
}

// Reads the arguments of one call in order; every one is an int but `real`.
class Arguments {
 public:
  Arguments(PyObject* const* values, Py_ssize_t count, Py_ssize_t expected) : values_(values) {
    if (count != expected) {
      PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, count);
      failed_ = true;
    }
  }
  std::int64_t integer() {
    if (failed_) return 0;
    const long long value = PyLong_AsLongLong(*values_++);
    failed_ = value == -1 && PyErr_Occurred() != nullptr;
    return value;
  }
  float real() {
    if (failed_) return 0;
    const double value = PyFloat_AsDouble(*values_++);
    failed_ = value == -1.0 && PyErr_Occurred() != nullptr;
    return static_cast<float>(value);
  }
  template <class T>
  T* pointer() {
    return reinterpret_cast<T*>(static_cast<std::intptr_t>(integer()));
  }
  Type type() { return static_cast<Type>(integer()); }
  int number() { return static_cast<int>(integer()); }
  bool failed() const { return failed_; }

 private:
  PyObject* const* values_;
  bool failed_ = false;
};

// Runs without the interpreter's lock, so that a server's threads answer meanwhile.
template <class Args>
PyObject* call(const Arguments& arguments, void (*kernel)(const Args&), const Args& args) {
  if (arguments.failed()) return nullptr;
  Py_BEGIN_ALLOW_THREADS;
  kernel(args);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

PyObject* linear(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count, 11);
  LinearArgs args;
  args.x = in.pointer<const void>();
  args.x_type = in.type();
  args.w = in.pointer<const void>();
  args.w_type = in.type();
  args.scale = in.pointer<const std::uint8_t>();
  args.bias = in.pointer<const float>();
  args.y = in.pointer<void>();
  args.m = in.integer();
  args.n = in.integer();
  args.k = in.integer();
  args.threads = in.number();
  return call(in, chosen().load()->linear, args);
}

PyObject* attention(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count, 18);
  AttentionArgs args;
  args.query = in.pointer<const void>();
  args.query_stride = in.integer();
  args.key_cache = in.pointer<const void>();
  args.value_cache = in.pointer<const void>();
  args.out = in.pointer<void>();
  args.type = in.type();
  args.block_tables = in.pointer<const std::int32_t>();
  args.query_start = in.pointer<const std::int32_t>();
  args.context_lens = in.pointer<const std::int32_t>();
  args.num_seqs = in.integer();
  args.max_blocks = in.integer();
  args.block_size = in.integer();
  args.num_heads = in.integer();
  args.num_kv_heads = in.integer();
  args.head_dim = in.integer();
  args.scale = in.real();
  args.window = in.integer();
  args.threads = in.number();
  return call(in, chosen().load()->attention, args);
}

PyObject* norm(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count, 10);
  NormArgs args;
  args.x = in.pointer<const void>();
  args.residual = in.pointer<void>();
  args.weight = in.pointer<const void>();
  args.out = in.pointer<void>();
  args.type = in.type();
  args.weight_type = in.type();
  args.rows = in.integer();
  args.width = in.integer();
  args.eps = in.real();
  args.threads = in.number();
  return call(in, chosen().load()->norm, args);
}

PyObject* rotary(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count, 13);
  RotaryArgs args;
  args.query = in.pointer<void>();
  args.query_stride = in.integer();
  args.query_heads = in.integer();
  args.key = in.pointer<void>();
  args.key_stride = in.integer();
  args.key_heads = in.integer();
  args.type = in.type();
  args.cos_sin = in.pointer<const float>();
  args.positions = in.pointer<const std::int64_t>();
  args.tokens = in.integer();
  args.head_dim = in.integer();
  args.rotary_dim = in.integer();
  args.threads = in.number();
  return call(in, chosen().load()->rotary, args);
}

PyObject* silu_and_mul(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count, 6);
  SiluArgs args;
  args.x = in.pointer<const void>();
  args.out = in.pointer<void>();
  args.type = in.type();
  args.rows = in.integer();
  args.width = in.integer();
  args.threads = in.number();
  return call(in, chosen().load()->silu_and_mul, args);
}

void write_rows(const WriteArgs& args) {
  for (std::int64_t t = 0; t < args.tokens; ++t) {
    const std::int64_t at = args.slots[t] * args.bytes;
    std::memcpy(static_cast<char*>(args.key_cache) + at, static_cast<const char*>(args.key) + t * args.key_stride, args.bytes);
    std::memcpy(static_cast<char*>(args.value_cache) + at, static_cast<const char*>(args.value) + t * args.value_stride,
                args.bytes);
  }
}

PyObject* write_kv(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count, 9);
  WriteArgs args;
  args.key = in.pointer<const void>();
  args.key_stride = in.integer();
  args.value = in.pointer<const void>();
  args.value_stride = in.integer();
  args.key_cache = in.pointer<void>();
  args.value_cache = in.pointer<void>();
  args.slots = in.pointer<const std::int64_t>();
  args.tokens = in.integer();
  args.bytes = in.integer();
  return call(in, write_rows, args);
}

PyObject* any_equal(PyObject*, PyObject* const* values, Py_ssize_t count) {
  Arguments in(values, count, 4);
  const auto* data = in.pointer<const std::uint8_t>();
  const std::int64_t bytes = in.integer();
  const auto mask = static_cast<std::uint8_t>(in.integer()), wanted = static_cast<std::uint8_t>(in.integer());
  if (in.failed()) return nullptr;
  bool found = false;
  constexpr std::int64_t kRun = 4096;  // a run has no early exit, so that the compiler makes vectors of it
  for (std::int64_t start = 0; start < bytes && !found; start += kRun) {
    const std::int64_t end = start + kRun < bytes ? start + kRun : bytes;
    std::uint8_t any = 0;
    for (std::int64_t i = start; i < end; ++i) any |= static_cast<std::uint8_t>((data[i] & mask) == wanted);
    found = any != 0;
  }
  return PyBool_FromLong(found);
}

PyObject* available(PyObject*, PyObject*) {
  int count;
  const InstructionSet* sets = instruction_sets(&count);
  PyObject* names = PyList_New(0);
  for (int i = 0; names != nullptr && i < count; ++i) {
    if (!sets[i].available) continue;
    PyObject* name = PyUnicode_FromString(sets[i].name);
    if (name == nullptr || PyList_Append(names, name) != 0) Py_CLEAR(names);
    Py_XDECREF(name);
  }
  return names;
}

PyObject* current(PyObject*, PyObject*) { return PyUnicode_FromString(chosen().load()->name); }

PyObject* use(PyObject*, PyObject* value) {
  int count;
  const InstructionSet* sets = instruction_sets(&count);
  for (int i = 0; i < count; ++i) {
    if (sets[i].available && PyUnicode_CompareWithASCIIString(value, sets[i].name) == 0) {
      chosen().store(sets[i].kernels);
      Py_RETURN_NONE;
    }
  }
  return PyErr_Format(PyExc_ValueError, "this machine has no instruction set %R", value);
}

PyObject* use_openmp(PyObject*, PyObject* value) {
  void* function = PyLong_AsVoidPtr(value);
  if (function == nullptr && PyErr_Occurred() != nullptr) return nullptr;
  set_openmp(function);
  Py_RETURN_NONE;
}

#define FAST(name, text) {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(name)), METH_FASTCALL, text}
PyMethodDef methods[] = {
    FAST(linear, "y = x W^T + b; see LinearArgs in kernels.h."),
    FAST(attention, "Paged attention; see AttentionArgs in kernels.h."),
    FAST(norm, "RMS norm, with or without a residual; see NormArgs in kernels.h."),
    FAST(rotary, "Rotary embedding in place; see RotaryArgs in kernels.h."),
    FAST(silu_and_mul, "silu(gate) * up; see SiluArgs in kernels.h."),
    FAST(write_kv, "Store keys and values; see WriteArgs in kernels.h."),
    FAST(any_equal, "any_equal(data, bytes, mask, value): whether a byte has byte & mask == value."),
    {"available", available, METH_NOARGS, "Instruction sets that this machine has, best first."},
    {"current", current, METH_NOARGS, "The instruction set in use."},
    {"use", use, METH_O, "Use this instruction set from now on, for tests."},
    {"use_openmp", use_openmp, METH_O, "Adopt the GOMP_parallel at this address; 0 returns to a single thread."},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "Eightfold's CPU kernels.", -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace eightfold

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&eightfold::module); }
