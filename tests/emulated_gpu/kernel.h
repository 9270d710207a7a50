// What all kernels use: views of tensors, a kernel's call with its inputs, outputs and stream,
// dtypes, and walks over arrays.
#pragma once

#include <algorithm>
#include <atomic>
#include <complex>
#include <cstring>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "device.h"
#include "tensorflow/c/kernels.h"
#include "tensorflow/core/framework/node_def_util.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace emulated_gpu {

using tensorflow::bfloat16;
using tensorflow::DataType;
using half = Eigen::half;
using complex64 = std::complex<float>;
using complex128 = std::complex<double>;
using Dims = std::vector<int64_t>;

// The product of dims[first] … dims[last - 1].
inline int64_t product(const Dims& dims, size_t first, size_t last) {
  int64_t all = 1;
  for (size_t d = first; d < last; ++d) all *= dims[d];
  return all;
}
inline int64_t product(const Dims& dims) { return product(dims, 0, dims.size()); }

// A tensor's memory, without a reference to it. A queued kernel of a GPU has only pointers, too:
// TensorFlow keeps the memory until the kernel has run.
struct View {
  char* data = nullptr;
  DataType type = tensorflow::DT_INVALID;
  Dims dims;
  int64_t size = 0;   // elements
  size_t width = 0;   // bytes of an element
  int64_t bytes = 0;  // size * width

  View() = default;
  explicit View(const tensorflow::Tensor& tensor)
      : data(static_cast<char*>(tensor.data())),
        type(tensor.dtype()),
        size(tensor.NumElements()),
        width(tensorflow::DataTypeSize(type)),
        bytes(size * width) {
    for (int d = 0; d < tensor.dims(); ++d) dims.push_back(tensor.dim_size(d));
  }

  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data);
  }
};

class Call;
using Body = void (*)(Call&);
using Bodies = std::map<std::string, Body>;

void add_math_bodies(Bodies& bodies);
void add_array_bodies(Bodies& bodies);
void add_variable_bodies(Bodies& bodies);

struct Kernel {
  Body body;
  tensorflow::NodeDef def;
  std::atomic<uint64_t> samples{0};  // random ones drawn so far
};

// One execution of a kernel. A body reads the arguments in host memory, allocates outputs, and
// queues its work with `run`.
class Call {
 public:
  tensorflow::OpKernelContext* const context;
  const tensorflow::NodeDef& def;

  Call(TF_OpKernelContext* c_context, Kernel& kernel);

  bool ok() const { return context->status().ok(); }
  int device() const { return device_; }
  void fail(const std::string& why);
  void fail(const absl::Status& status) { context->CtxFailure(status); }

  template <class T>
  T attr(const char* name) const {
    T value{};
    TF_CHECK_OK(tensorflow::GetNodeAttr(def, name, &value));
    return value;
  }

  View input(int i);
  // The memory may be that of one of the inputs in `reuse`, if nobody else reads it.
  View output(int i, const Dims& dims, const std::vector<int>& reuse = {});
  std::vector<View> inputs(int first, int count);
  View checked(View view, bool is_on_host, const char* what);

  Dims host_integers(int i);
  int64_t host_integer(int i) { return host_integers(i).at(0); }
  int axis(int64_t axis, size_t rank);  // from 0 on, for one that may count from the end

  void run(Work work);                          // of this kernel, after all that is queued
  void launch_for_each(size_t parts);           // timed mode: so many tensors are joined or cut
  void cost(double launches) { launches_ = launches; }  // timed mode: on the host
  void copy(const View& from, const View& to);  // queued, too, but no kernel
  void wait() const;                            // blocks the host until all that is queued has run

  // Random samples for the kernel's present call: how many all earlier calls have drawn.
  uint64_t reserve_samples(uint64_t count) { return kernel_.samples.fetch_add(count); }

 private:
  Kernel& kernel_;
  SP_Stream stream_;
  int device_;
  bool computes_on_host_;
  std::vector<View> unwritten_;  // outputs
  int kernels_ = 1;
  double launches_ = 1;  // of a usual kernel's price on the host

  double named_seconds() const;
  double launch_seconds() const;
  double memory_seconds() const;
};

// ---- Dtypes: f(T()) for the C++ type of a dtype ----

#define EMULATED_GPU_CASE(DTYPE, TYPE) \
  case tensorflow::DTYPE:              \
    return f(TYPE())

template <class F>
void for_float(DataType type, F f) {
  switch (type) {
    EMULATED_GPU_CASE(DT_HALF, half);
    EMULATED_GPU_CASE(DT_BFLOAT16, bfloat16);
    EMULATED_GPU_CASE(DT_FLOAT, float);
    EMULATED_GPU_CASE(DT_DOUBLE, double);
    default:
      LOG(FATAL) << "emulated GPU: " << tensorflow::DataTypeString(type);
  }
}

template <class F>
void for_real(DataType type, F f) {
  switch (type) {
    EMULATED_GPU_CASE(DT_INT8, int8_t);
    EMULATED_GPU_CASE(DT_INT16, int16_t);
    EMULATED_GPU_CASE(DT_INT32, int32_t);
    EMULATED_GPU_CASE(DT_INT64, int64_t);
    EMULATED_GPU_CASE(DT_UINT8, uint8_t);
    EMULATED_GPU_CASE(DT_UINT16, uint16_t);
    EMULATED_GPU_CASE(DT_UINT32, uint32_t);
    EMULATED_GPU_CASE(DT_UINT64, uint64_t);
    EMULATED_GPU_CASE(DT_BOOL, bool);
    default:
      for_float(type, f);
  }
}

template <class F>
void for_number(DataType type, F f) {
  switch (type) {
    EMULATED_GPU_CASE(DT_COMPLEX64, complex64);
    EMULATED_GPU_CASE(DT_COMPLEX128, complex128);
    default:
      for_real(type, f);
  }
}

template <class F>
void for_float_or_complex(DataType type, F f) {
  switch (type) {
    EMULATED_GPU_CASE(DT_COMPLEX64, complex64);
    EMULATED_GPU_CASE(DT_COMPLEX128, complex128);
    default:
      for_float(type, f);
  }
}

template <class T>
constexpr bool is_16_bits = std::is_same_v<T, half> || std::is_same_v<T, bfloat16>;
template <class T>
constexpr bool is_complex = std::is_same_v<T, complex64> || std::is_same_v<T, complex128>;

// The type that a kernel computes in. GPUs compute 16-bit floats in float32.
template <class T>
using Wide = std::conditional_t<is_16_bits<T>, float, T>;

// The type of long sums: its error does not show in T.
template <class T>
using Long = std::conditional_t<is_16_bits<T> || std::is_same_v<T, float>, double,
                                std::conditional_t<std::is_same_v<T, complex64>, complex128, T>>;

// Elements of integer arrays.
inline int64_t integer_at(const View& view, int64_t n) {
  switch (view.width) {
    case 1:
      return view.type == tensorflow::DT_INT8 ? view.as<int8_t>()[n] : view.as<uint8_t>()[n];
    case 4:
      return view.as<int32_t>()[n];
    default:
      return view.as<int64_t>()[n];
  }
}

inline void set_integer(const View& view, int64_t n, int64_t value) {
  if (view.type == tensorflow::DT_INT32) view.as<int32_t>()[n] = value;
  else view.as<int64_t>()[n] = value;
}

// ---- Walks over arrays: broadcasting, reductions, slices and transposes are all such walks ----

inline Dims strides_of(const Dims& dims) {
  Dims strides(dims.size(), 1);
  for (int d = int(dims.size()) - 2; d >= 0; --d) strides[d] = strides[d + 1] * dims[d + 1];
  return strides;
}

// The strides of an array of `dims` that is broadcast to `wider`.
inline Dims broadcast_strides(const Dims& dims, const Dims& wider) {
  Dims own = strides_of(dims);
  Dims strides(wider.size(), 0);
  size_t added = wider.size() - dims.size();
  for (size_t d = 0; d < dims.size(); ++d) {
    if (dims[d] != 1) strides[added + d] = own[d];
  }
  return strides;
}

// Calls f(n, x, y) for each of `dims`' elements, in order: its number, and its two places by the
// two lists of strides.
template <class F>
void walk(const Dims& dims, const Dims& x_strides, const Dims& y_strides, F f) {
  Dims at(dims.size());
  int64_t x = 0;
  int64_t y = 0;
  int64_t count = product(dims);
  for (int64_t n = 0; n < count; ++n) {
    f(n, x, y);
    for (int d = int(dims.size()) - 1; d >= 0; --d) {
      x += x_strides[d];
      y += y_strides[d];
      if (++at[d] < dims[d]) break;
      x -= x_strides[d] * dims[d];
      y -= y_strides[d] * dims[d];
      at[d] = 0;
    }
  }
}

// The shape that x and y are broadcast to. Fails if there is none.
inline Dims broadcast(Call& call, const Dims& x, const Dims& y) {
  Dims wider(std::max(x.size(), y.size()), 1);
  for (const Dims* dims : {&x, &y}) {
    size_t added = wider.size() - dims->size();
    for (size_t d = 0; d < dims->size(); ++d) {
      int64_t dim = (*dims)[d];
      int64_t& wide = wider[added + d];
      if (dim != wide && dim != 1 && wide != 1) call.fail("the shapes do not fit");
      if (dim != 1) wide = dim;
    }
  }
  return wider;
}

}  // namespace emulated_gpu
