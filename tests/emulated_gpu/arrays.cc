// Kernels that compute nothing: shapes, rows by index, new values, random numbers.

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <string_view>

#include "kernel.h"
#include "tensorflow/core/kernels/random_ops_util.h"
#include "tensorflow/core/lib/random/random_distributions.h"

namespace emulated_gpu {
namespace {

// One side of a move: an array, the strides of the walk there, and the first element.
struct Side {
  View view;
  Dims strides;
  int64_t first = 0;
};

void move_elements(const Dims& dims, const Side& from, const Side& to) {
  const size_t width = from.view.width;
  const char* source = from.view.data + from.first * width;
  char* target = to.view.data + to.first * width;
  walk(dims, from.strides, to.strides, [&](int64_t, int64_t x, int64_t y) {
    std::memcpy(target + y * width, source + x * width, width);
  });
}

void move(Call& call, const Dims& dims, const Side& from, const Side& to) {
  call.run([=] { move_elements(dims, from, to); });
}

// ---- Shapes ----

// Cuts a whole along an axis into parts, or joins them: both copy strips of bytes.
struct Strips {
  View whole;
  std::vector<View> parts;
  int64_t count;  // strips of a part

  template <class F>
  void for_each(F f) const {  // f(a strip in the whole, the same in the part, its bytes)
    if (whole.size == 0) return;
    int64_t stride = whole.bytes / count;
    int64_t first = 0;
    for (const View& part : parts) {
      int64_t bytes = part.bytes / count;
      for (int64_t n = 0; n < count; ++n) {
        f(whole.data + n * stride + first, part.data + n * bytes, bytes);
      }
      first += bytes;
    }
  }
};

void join(Call& call, const std::vector<View>& parts, int axis, const Dims& dims) {
  View whole = call.output(0, dims);
  Strips strips{whole, parts, product(dims, 0, axis)};
  call.run([=] {
    strips.for_each([](char* whole, char* part, int64_t bytes) {
      if (bytes) std::memcpy(whole, part, bytes);
    });
  });
}

void cut(Call& call, const View& whole, int axis, const std::vector<Dims>& shapes) {
  Strips strips{whole, {}, product(whole.dims, 0, axis)};
  for (const Dims& shape : shapes) strips.parts.push_back(call.output(strips.parts.size(), shape));
  call.run([=] {
    strips.for_each([](char* whole, char* part, int64_t bytes) {
      if (bytes) std::memcpy(part, whole, bytes);
    });
  });
}

void concat_along(Call& call, const std::vector<View>& parts, int64_t any_axis) {
  Dims dims = parts[0].dims;
  int axis = call.axis(any_axis, dims.size());
  if (!call.ok()) return;
  dims[axis] = 0;
  for (const View& part : parts) {
    Dims others = part.dims;
    if (others.size() == dims.size()) others[axis] = dims[axis];
    if (others != dims) return call.fail("the dimensions of the inputs should match");
    dims[axis] += part.dims[axis];
  }
  call.launch_for_each(parts.size());
  join(call, parts, axis, dims);
}

void concat(Call& call) {
  int count = call.attr<int32_t>("N");
  concat_along(call, call.inputs(1, count), call.host_integer(0));
}

void concat_v2(Call& call) {
  int count = call.attr<int32_t>("N");
  concat_along(call, call.inputs(0, count), call.host_integer(count));
}

void pack(Call& call) {
  std::vector<View> parts = call.inputs(0, call.context->num_inputs());
  Dims dims = parts[0].dims;
  int axis = call.axis(call.attr<int32_t>("axis"), dims.size() + 1);
  if (!call.ok()) return;
  dims.insert(dims.begin() + axis, parts.size());
  join(call, parts, axis, dims);
}

void unpack(Call& call) {
  View x = call.input(0);
  int axis = call.axis(call.attr<int32_t>("axis"), x.dims.size());
  if (!call.ok()) return;
  Dims shape = x.dims;
  shape.erase(shape.begin() + axis);
  cut(call, x, axis, std::vector<Dims>(x.dims[axis], shape));
}

void split_into(Call& call, const View& x, int axis, const Dims& sizes) {
  std::vector<Dims> shapes(sizes.size(), x.dims);
  for (size_t i = 0; i < sizes.size(); ++i) shapes[i][axis] = sizes[i];
  // Parts along the first dimension are views of x if each of them begins at an aligned address.
  int64_t row_bytes = product(x.dims, axis + 1, x.dims.size()) * x.width;
  auto is_aligned = [=](int64_t size) { return size * row_bytes % EIGEN_MAX_ALIGN_BYTES == 0; };
  bool are_views = axis == 0 && std::all_of(sizes.begin(), sizes.end(), is_aligned);
  call.launch_for_each(are_views ? 0 : sizes.size());
  cut(call, x, axis, shapes);
}

void split(Call& call) {
  View x = call.input(1);
  int axis = call.axis(call.host_integer(0), x.dims.size());
  int count = call.attr<int32_t>("num_split");
  if (!call.ok()) return;
  if (x.dims[axis] % count) return call.fail("the dimension does not divide");
  split_into(call, x, axis, Dims(count, x.dims[axis] / count));
}

void split_v(Call& call) {
  View x = call.input(0);
  Dims sizes = call.host_integers(1);
  int axis = call.axis(call.host_integer(2), x.dims.size());
  if (!call.ok()) return;
  int64_t rest = x.dims[axis];
  for (int64_t size : sizes) rest -= std::max<int64_t>(size, 0);
  auto open = std::find(sizes.begin(), sizes.end(), -1);
  if (open != sizes.end()) {
    *open = rest;
    rest = 0;
  }
  if (rest) return call.fail("the sizes do not add up");
  split_into(call, x, axis, sizes);
}

void slice(Call& call) {
  View x = call.input(0);
  Dims begin = call.host_integers(1);
  Dims sizes = call.host_integers(2);
  Dims strides = strides_of(x.dims);
  int64_t first = 0;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] < 0) sizes[d] = x.dims[d] - begin[d];
    bool fits = begin[d] >= 0 && begin[d] + sizes[d] <= x.dims[d];
    if (!fits) return call.fail("the slice is out of range");
    first += begin[d] * strides[d];
  }
  View y = call.output(0, sizes);
  move(call, sizes, {x, strides, first}, {y, strides_of(sizes)});
}

// What a strided slice reads of an array, or its gradient writes.
struct StridedSlice {
  Dims shape;    // of the slice
  Dims walked;   // the shape without new axes of size 1
  Dims strides;  // of `walked` in the array
  int64_t first = 0;
};

// A bit of each mask tells whether the entry of the same number is … (see tf.strided_slice).
struct SliceMasks {
  explicit SliceMasks(const Call& call)
      : begin(call.attr<int32_t>("begin_mask")),
        end(call.attr<int32_t>("end_mask")),
        ellipsis(call.attr<int32_t>("ellipsis_mask")),
        new_axis(call.attr<int32_t>("new_axis_mask")),
        shrink(call.attr<int32_t>("shrink_axis_mask")) {}
  int begin, end, ellipsis, new_axis, shrink;
  static bool has(int mask, size_t entry) { return mask >> entry & 1; }
};

// The range of one axis: its first element and how many.
std::pair<int64_t, int64_t> stepped_range(int64_t dim, int64_t begin, int64_t end, int64_t step,
                                          bool from_start, bool to_end) {
  int64_t lowest = step > 0 ? 0 : -1;
  int64_t highest = step > 0 ? dim : dim - 1;
  auto limited = [&](int64_t at) { return std::clamp(at < 0 ? at + dim : at, lowest, highest); };
  int64_t first = from_start ? (step > 0 ? lowest : highest) : limited(begin);
  int64_t last = to_end ? (step > 0 ? highest : lowest) : limited(end);
  int64_t towards_zero = step > 0 ? 1 : -1;
  int64_t count = (last - first + step - towards_zero) / step;
  return {first, std::max<int64_t>(count, 0)};
}

StridedSlice strided_slice_of(Call& call, const Dims& dims) {
  Dims begin = call.host_integers(1);
  Dims end = call.host_integers(2);
  Dims steps = call.host_integers(3);
  SliceMasks masks(call);
  Dims own = strides_of(dims);
  StridedSlice slice;
  size_t d = 0;
  auto take = [&](int64_t first, int64_t count, int64_t step) {
    slice.shape.push_back(count);
    slice.walked.push_back(count);
    slice.strides.push_back(own[d] * step);
    slice.first += first * own[d];
    ++d;
  };
  auto uses_an_axis = [&](size_t i) {
    return !masks.has(masks.new_axis, i) && !masks.has(masks.ellipsis, i);
  };
  size_t named = 0;
  for (size_t i = 0; i < begin.size(); ++i) named += uses_an_axis(i);
  for (size_t i = 0; i < begin.size(); ++i) {
    if (masks.has(masks.ellipsis, i)) {
      for (size_t left = dims.size() - named; left > 0; --left) take(0, dims[d], 1);
    } else if (masks.has(masks.new_axis, i)) {
      slice.shape.push_back(1);
    } else if (masks.has(masks.shrink, i)) {
      int64_t at = begin[i] < 0 ? begin[i] + dims[d] : begin[i];
      if (at < 0 || at >= dims[d]) call.fail("the slice is out of range");
      slice.first += at * own[d];
      ++d;
    } else {
      bool from_start = masks.has(masks.begin, i);
      bool to_end = masks.has(masks.end, i);
      auto [first, count] =
          stepped_range(dims[d], begin[i], end[i], steps[i], from_start, to_end);
      take(first, count, steps[i]);
    }
  }
  while (d < dims.size()) take(0, dims[d], 1);
  return slice;
}

void strided_slice(Call& call) {
  View x = call.input(0);
  StridedSlice slice = strided_slice_of(call, x.dims);
  if (!call.ok()) return;
  View y = call.output(0, slice.shape);
  move(call, slice.walked, {x, slice.strides, slice.first}, {y, strides_of(slice.walked)});
}

void strided_slice_grad(Call& call) {
  Dims dims = call.host_integers(0);
  StridedSlice slice = strided_slice_of(call, dims);
  View dy = call.input(4);
  View dx = call.output(0, dims);
  call.run([=] {
    std::memset(dx.data, 0, dx.bytes);
    move_elements(slice.walked, {dy, strides_of(slice.walked)}, {dx, slice.strides, slice.first});
  });
}

void transpose(Call& call) {
  View x = call.input(0);
  Dims own = strides_of(x.dims);
  Dims dims;
  Dims strides;
  for (int64_t axis : call.host_integers(1)) {
    dims.push_back(x.dims.at(axis));
    strides.push_back(own.at(axis));
  }
  View y = call.output(0, dims);
  move(call, dims, {x, strides}, {y, strides_of(dims)});
}

void reverse(Call& call) {
  View x = call.input(0);
  Side from{x, strides_of(x.dims)};
  for (int64_t any_axis : call.host_integers(1)) {
    int axis = call.axis(any_axis, x.dims.size());
    if (!call.ok()) return;
    from.first += (x.dims[axis] - 1) * from.strides[axis];
    from.strides[axis] = -from.strides[axis];
  }
  View y = call.output(0, x.dims);
  if (x.size) move(call, x.dims, from, {y, strides_of(x.dims)});
}

void broadcast_to(Call& call) {
  View x = call.input(0);
  Dims dims = call.host_integers(1);
  broadcast(call, x.dims, dims);
  if (!call.ok()) return;
  View y = call.output(0, dims);
  move(call, dims, {x, broadcast_strides(x.dims, dims)}, {y, strides_of(dims)});
}

void tile(Call& call) {
  View x = call.input(0);
  Dims times = call.host_integers(1);
  Dims own = strides_of(x.dims);
  Dims dims;
  Dims walked;  // each axis twice: its tiles, and the elements in a tile
  Dims strides;
  for (size_t d = 0; d < times.size(); ++d) {
    dims.push_back(times[d] * x.dims[d]);
    walked.insert(walked.end(), {times[d], x.dims[d]});
    strides.insert(strides.end(), {0, own[d]});
  }
  View y = call.output(0, dims);
  move(call, walked, {x, strides}, {y, strides_of(walked)});
}

void fill(Call& call) {
  Dims dims = call.host_integers(0);
  View value = call.input(1);
  View y = call.output(0, dims);
  move(call, dims, {value, Dims(dims.size(), 0)}, {y, strides_of(dims)});
}

void empty(Call& call) {
  View y = call.output(0, call.host_integers(0));
  bool has_zeros = call.attr<bool>("init");
  call.run([=] {
    if (has_zeros) std::memset(y.data, 0, y.bytes);
  });
}

// ---- Rows by index ----

void gather_along(Call& call, int axis) {
  View x = call.input(0);
  View indices = call.input(1);
  Dims dims(x.dims.begin(), x.dims.begin() + axis);
  dims.insert(dims.end(), indices.dims.begin(), indices.dims.end());
  dims.insert(dims.end(), x.dims.begin() + axis + 1, x.dims.end());
  View y = call.output(0, dims);
  int64_t outer = product(x.dims, 0, axis);
  int64_t row_bytes = product(x.dims, axis + 1, x.dims.size()) * x.width;
  int64_t limit = x.dims[axis];
  call.run([=] {
    for (int64_t n = 0; n < outer * indices.size; ++n) {
      int64_t index = integer_at(indices, n % indices.size);
      int64_t from = n / indices.size * limit + index;
      char* to = y.data + n * row_bytes;
      // As on a GPU, an index out of range gives zeros.
      bool exists = index >= 0 && index < limit;
      exists ? std::memcpy(to, x.data + from * row_bytes, row_bytes)
             : std::memset(to, 0, row_bytes);
    }
  });
}

void gather(Call& call) { gather_along(call, 0); }

void gather_v2(Call& call) {
  size_t rank = call.input(0).dims.size();
  int axis = call.axis(call.host_integer(2), rank);
  if (call.attr<int32_t>("batch_dims")) call.fail("not emulated: batch_dims");
  if (call.ok()) gather_along(call, axis);
}

// The order in which a device adds up `count` rows: with SUM_SEED another one on each device, as the
// order of a GPU's atomic additions varies.
Dims order_of_sum(int device, int64_t count) {
  static const double seed = number_option("SUM_SEED", 0);
  Dims order(count);
  std::iota(order.begin(), order.end(), 0);
  if (seed) std::shuffle(order.begin(), order.end(), std::mt19937(64 * int(seed) + device));
  return order;
}

void unsorted_segment_sum(Call& call) {
  View rows = call.input(0);
  View indices = call.input(1);
  Dims dims = {call.host_integer(2)};
  dims.insert(dims.end(), rows.dims.begin() + indices.dims.size(), rows.dims.end());
  View sums = call.output(0, dims);
  int64_t row = product(dims, 1, dims.size());
  int device = call.device();
  call.run([=] {
    for_number(sums.type, [&](auto zero) {
      using T = decltype(zero);
      std::fill_n(sums.as<T>(), sums.size, T(0));
      for (int64_t n : order_of_sum(device, indices.size)) {
        int64_t index = integer_at(indices, n);
        if (index < 0 || index >= dims[0]) continue;  // a GPU drops it
        T* sum = sums.as<T>() + index * row;
        const T* term = rows.as<T>() + n * row;
        for (int64_t k = 0; k < row; ++k) sum[k] = T(sum[k] + term[k]);
      }
    });
  });
}

// ---- Ops whose output's size depends on values: as on a GPU, the host waits for them ----

// Equal are elements with the same bytes.
void unique(Call& call) {
  View x = call.input(0);
  View places = call.output(1, x.dims);
  if (!call.ok()) return;
  call.wait();
  std::map<std::string_view, int64_t> place_of;
  std::vector<std::string_view> found;
  Dims place_at(x.size);
  for (int64_t n = 0; n < x.size; ++n) {
    std::string_view bytes(x.data + n * x.width, x.width);
    // In timed mode no element has a value: so none is equal to another.
    bool is_new = is_timed() || place_of.emplace(bytes, found.size()).second;
    if (is_new) found.push_back(bytes);
    place_at[n] = is_timed() ? n : place_of[bytes];
  }
  View y = call.output(0, {int64_t(found.size())});
  call.run([=] {
    for (int64_t n = 0; n < y.size; ++n) {
      std::memcpy(y.data + n * y.width, found[n].data(), y.width);
    }
    for (int64_t n = 0; n < places.size; ++n) set_integer(places, n, place_at[n]);
  });
}

// The places of the elements that are not zero: a row of indices for each.
void where(Call& call) {
  View x = call.input(0);
  call.wait();
  int64_t rank = x.dims.size();
  Dims indices;
  const std::string zero(x.width, '\0');
  for (int64_t n = 0; n < x.size; ++n) {
    if (zero.compare(0, x.width, x.data + n * x.width, x.width) == 0) continue;
    Dims strides = strides_of(x.dims);
    for (int64_t d = 0; d < rank; ++d) indices.push_back(n / strides[d] % x.dims[d]);
  }
  int64_t count = rank ? indices.size() / rank : 0;
  View y = call.output(0, {count, rank});
  call.run([=] { std::copy(indices.begin(), indices.end(), y.as<int64_t>()); });
}

// ---- New values ----

void range(Call& call) {
  View start = call.input(0);
  View limit = call.input(1);
  View delta = call.input(2);
  double count = 0;
  for_real(start.type, [&](auto zero) {
    using T = decltype(zero);
    double distance = double(limit.as<T>()[0]) - double(start.as<T>()[0]);
    count = std::ceil(distance / double(delta.as<T>()[0]));
  });
  // The arguments are in host memory, which TensorFlow may free before the kernel runs.
  std::string first(start.data, start.width);
  std::string step(delta.data, delta.width);
  View y = call.output(0, {int64_t(std::max(count, 0.0))});
  call.run([=] {
    for_real(y.type, [&](auto zero) {
      using T = decltype(zero);
      T value = *reinterpret_cast<const T*>(first.data());
      for (int64_t n = 0; n < y.size; ++n) {
        y.as<T>()[n] = value;
        value = T(value + *reinterpret_cast<const T*>(step.data()));
      }
    });
  });
}

void one_hot(Call& call) {
  View indices = call.input(0);
  int64_t depth = call.host_integer(1);
  View on = call.input(2);
  View off = call.input(3);
  Dims dims = indices.dims;
  int axis = call.axis(call.attr<int64_t>("axis"), dims.size() + 1);
  if (!call.ok()) return;
  dims.insert(dims.begin() + axis, depth);
  View y = call.output(0, dims);
  int64_t inner = product(dims, axis + 1, dims.size());
  call.run([=] {
    for (int64_t n = 0; n < y.size; ++n) {
      int64_t k = n / inner % depth;
      int64_t index = integer_at(indices, n / inner / depth * inner + n % inner);
      std::memcpy(y.data + n * y.width, index == k ? on.data : off.data, y.width);
    }
  });
}

void pad(Call& call) {
  View x = call.input(0);
  Dims paddings = call.host_integers(1);
  std::string padding(x.width, '\0');
  bool has_value = call.context->num_inputs() > 2;
  if (has_value) padding.assign(call.input(2).data, x.width);
  Dims dims;
  for (size_t d = 0; d < x.dims.size(); ++d) {
    dims.push_back(paddings[2 * d] + x.dims[d] + paddings[2 * d + 1]);
  }
  View y = call.output(0, dims);
  Dims strides = strides_of(dims);
  int64_t first = 0;
  for (size_t d = 0; d < x.dims.size(); ++d) first += paddings[2 * d] * strides[d];
  call.run([=] {
    for (int64_t n = 0; n < y.size; ++n) {
      std::memcpy(y.data + n * y.width, padding.data(), y.width);
    }
    move_elements(x.dims, {x, strides_of(x.dims)}, {y, strides, first});
  });
}

// ---- Random numbers: TensorFlow's generator and distributions, in its CPU kernels' order ----

using Philox = tensorflow::random::PhiloxRandom;
constexpr int64_t RESERVED = 256;  // samples for an element

template <class T, class Distribution>
void draw(const View& y, Philox generator, Distribution distribution) {
  constexpr int64_t GROUP = Distribution::kResultElementCount;
  for (int64_t first = 0; first < y.size; first += GROUP) {
    auto samples = distribution(&generator);
    int64_t count = std::min(GROUP, y.size - first);
    for (int64_t n = 0; n < count; ++n) y.as<T>()[first + n] = samples[n];
  }
}

struct Uniform {
  template <class T>
  static void draw_all(const View& y, const Philox& generator) {
    draw<T>(y, generator, tensorflow::random::UniformDistribution<Philox, T>());
  }
};

struct Normal {
  template <class T>
  static void draw_all(const View& y, const Philox& generator) {
    draw<T>(y, generator, tensorflow::random::NormalDistribution<Philox, T>());
  }
};

// It draws again if a value is beyond two standard deviations, and each group has its reserve.
struct TruncatedNormal {
  template <class T>
  static void draw_all(const View& y, const Philox& generator) {
    using Single = tensorflow::random::SingleSampleAdapter<Philox>;
    tensorflow::random::TruncatedNormalDistribution<Single, T> distribution;
    constexpr int64_t GROUP = decltype(distribution)::kResultElementCount;
    constexpr int64_t SKIPPED = GROUP * RESERVED / Philox::kResultElementCount;
    for (int64_t first = 0; first < y.size; first += GROUP) {
      Philox own = generator;
      own.Skip(first / GROUP * SKIPPED);
      Single single(&own);
      auto samples = distribution(&single);
      int64_t count = std::min(GROUP, y.size - first);
      for (int64_t n = 0; n < count; ++n) y.as<T>()[first + n] = samples[n];
    }
  }
};

template <class Distribution>
void draw_floats(const View& y, const Philox& generator) {
  for_float(y.type, [&](auto zero) {
    Distribution::template draw_all<decltype(zero)>(y, generator);
  });
}

void draw_integers(const View& y, const Philox& generator, int64_t least, int64_t limit) {
  if (y.type == tensorflow::DT_INT32) {
    using Distribution = tensorflow::random::UniformDistribution<Philox, int32_t>;
    draw<int32_t>(y, generator, Distribution(least, limit));
  } else {
    using Distribution = tensorflow::random::UniformDistribution<Philox, int64_t>;
    draw<int64_t>(y, generator, Distribution(least, limit));
  }
}

// Where this call of the kernel begins. Without seeds TensorFlow draws them. Here the op's name
// takes their place, so that a run is like the one before.
Philox next_generator(Call& call, int64_t size) {
  uint64_t seed = call.attr<int64_t>("seed");
  uint64_t seed2 = call.attr<int64_t>("seed2");
  if (seed == 0 && seed2 == 0) seed = std::hash<std::string>()(call.def.name());
  Philox generator(seed, seed2);
  generator.Skip(call.reserve_samples(size * RESERVED));
  return generator;
}

template <class Distribution>
void random(Call& call) {
  View y = call.output(0, call.host_integers(0));
  Philox generator = next_generator(call, y.size);
  call.run([=] { draw_floats<Distribution>(y, generator); });
}

void random_integers(Call& call) {
  View y = call.output(0, call.host_integers(0));
  int64_t least = call.host_integer(1);
  int64_t limit = call.host_integer(2);
  Philox generator = next_generator(call, y.size);
  call.run([=] { draw_integers(y, generator, least, limit); });
}

// The generator of a stateless op's two seeds: TensorFlow scrambles them.
Philox scrambled(const Dims& seeds) {
  Philox::Key fixed;
  fixed[0] = 0x3ec8f720;
  fixed[1] = 0x02461e29;
  uint64_t words[2] = {uint64_t(seeds[0]), uint64_t(seeds[1])};
  auto mixed = Philox(tensorflow::GetCounterFromMem(words), fixed)();
  Philox::Key key;
  key[0] = mixed[0];
  key[1] = mixed[1];
  Philox::ResultType counter;
  counter[0] = counter[1] = 0;
  counter[2] = mixed[2];
  counter[3] = mixed[3];
  return Philox(counter, key);
}

template <class Distribution>
void stateless_random(Call& call) {
  View y = call.output(0, call.host_integers(0));
  Philox generator = scrambled(call.host_integers(1));
  call.run([=] { draw_floats<Distribution>(y, generator); });
}

void key_and_counter(Call& call) {
  Philox generator = scrambled(call.host_integers(0));
  View key = call.output(0, {1});
  View counter = call.output(1, {2});
  call.run([=] {
    tensorflow::WriteKeyToMem(generator.key(), key.as<uint64_t>());
    tensorflow::WriteCounterToMem(generator.counter(), counter.as<uint64_t>());
  });
}

Philox generator_of(const View& key, const View& counter) {
  return tensorflow::GetPhiloxRandomFromCounterKeyMem(counter.as<uint64_t>(), key.as<uint64_t>());
}

template <class Distribution>
void stateless_random_v2(Call& call) {
  View y = call.output(0, call.host_integers(0));
  View key = call.input(1);
  View counter = call.input(2);
  call.run([=] { draw_floats<Distribution>(y, generator_of(key, counter)); });
}

void stateless_random_integers(Call& call) {
  View y = call.output(0, call.host_integers(0));
  View key = call.input(1);
  View counter = call.input(2);
  int64_t least = call.host_integer(4);
  int64_t limit = call.host_integer(5);
  call.run([=] { draw_integers(y, generator_of(key, counter), least, limit); });
}

}  // namespace

void add_array_bodies(Bodies& bodies) {
  bodies.insert({
      {"BroadcastTo", broadcast_to},
      {"Concat", concat},
      {"ConcatV2", concat_v2},
      {"Empty", empty},
      {"Fill", fill},
      {"OneHot", one_hot},
      {"Pack", pack},
      {"Pad", pad},
      {"PadV2", pad},
      {"Range", range},
      {"ReverseV2", reverse},
      {"Slice", slice},
      {"Split", split},
      {"SplitV", split_v},
      {"StridedSlice", strided_slice},
      {"StridedSliceGrad", strided_slice_grad},
      {"Tile", tile},
      {"Transpose", transpose},
      {"Unpack", unpack},

      {"Gather", gather},
      {"GatherV2", gather_v2},
      {"Unique", unique},
      {"UnsortedSegmentSum", unsorted_segment_sum},
      {"Where", where},

      {"RandomStandardNormal", random<Normal>},
      {"RandomUniform", random<Uniform>},
      {"RandomUniformInt", random_integers},
      {"StatelessRandomGetKeyCounter", key_and_counter},
      {"StatelessRandomNormal", stateless_random<Normal>},
      {"StatelessRandomNormalV2", stateless_random_v2<Normal>},
      {"StatelessRandomUniform", stateless_random<Uniform>},
      {"StatelessRandomUniformIntV2", stateless_random_integers},
      {"StatelessRandomUniformV2", stateless_random_v2<Uniform>},
      {"StatelessTruncatedNormal", stateless_random<TruncatedNormal>},
      {"StatelessTruncatedNormalV2", stateless_random_v2<TruncatedNormal>},
      {"TruncatedNormal", random<TruncatedNormal>},
  });
}

}  // namespace emulated_gpu
