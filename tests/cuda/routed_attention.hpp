#pragma once

#include <cstdint>
#include <limits>
#include <random>

#include "support/device_test.hpp"
#include <seqmix/kernels/cuda_kernels.hpp>
#include <seqmix/kernels/reference/attention.hpp>
#include <seqmix/selectors/chunks.hpp>

/// Random routed attention, run on the device and by the kernels of the CPU in double on the same stored numbers.
namespace seqmix::testing {

struct routed_case {
  attention_shape shape;
  std::vector<index_t> offsets;  ///< of packed sequences
  std::vector<index_t> past;     ///< [N] tokens before row 0; empty: none
  index_t capacity = 0;
  enum class gate { none, tokens, constant } gate = gate::none;
  bool sink = false;
  index_t gap = 0;  ///< numbers between rows
  std::vector<double> q, k, v, g, past_k, past_v, past_g, sinks, d_o;

  index_t rows() const { return shape.seq.rows(); }
  index_t count() const { return shape.seq.count(); }
};

struct routed_sizes {
  index_t heads = 4, key_heads = 2, value_heads = 2, gate_heads = 2, key_dim = 5, value_dim = 3;
  index_t chunk = 5, window = 4, top_k = 1;
  std::uint64_t seed = 1;
};

inline routed_case make_case(routed_sizes const& size, std::vector<index_t> lengths) {
  routed_case c;
  auto& s = c.shape;
  s.heads = size.heads;
  s.key_heads = size.key_heads;
  s.value_heads = size.value_heads;
  s.gate_heads = size.gate_heads;
  s.key_dim = size.key_dim;
  s.value_dim = size.value_dim;
  s.scale = 1.0 / std::sqrt(double(size.key_dim));
  s.knobs.temperature = 0.8;
  s.select.chunk = size.chunk;
  s.select.window = size.window;
  s.select.top_k = size.top_k;
  c.offsets = {0};
  for (index_t length : lengths) c.offsets.push_back(c.offsets.back() + length);
  return c;
}

/// Draws all numbers, rounded as T and its accumulator store them.
template <class T>
void draw(routed_case& c, std::uint64_t seed) {
  std::mt19937_64 engine(seed);
  auto const uniform = [&] { return double(engine() >> 11) * 0x1p-53; };
  auto const normals = [&](index_t count) {
    std::vector<double> x;
    for (index_t i = 0; i < count; ++i) {
      double sum = -6;
      for (int j = 0; j < 12; ++j) sum += uniform();
      x.push_back(sum);
    }
    return x;
  };
  auto const decays = [&](index_t count) {
    std::vector<double> x;
    for (index_t i = 0; i < count; ++i) x.push_back(-0.3 * uniform());
    return as_double(stored<accumulator_t<T>>(x));
  };
  bool const equal = c.offsets.size() == 2;
  c.shape.seq = equal ? sequences::batch(1, c.offsets[1]) : sequences::packed(c.offsets);
  auto const& s = c.shape;
  index_t const R = c.rows(), L = c.count() * c.capacity;
  c.q = as_double(stored<T>(normals(R * s.heads * s.key_dim)));
  c.k = as_double(stored<T>(normals(R * s.key_heads * s.key_dim)));
  c.v = as_double(stored<T>(normals(R * s.value_heads * s.value_dim)));
  c.d_o = as_double(stored<T>(normals(R * s.heads * s.value_dim)));
  c.past_k = as_double(stored<T>(normals(L * s.key_heads * s.key_dim)));
  c.past_v = as_double(stored<T>(normals(L * s.value_heads * s.value_dim)));
  if (c.gate == routed_case::gate::tokens) c.g = decays(R * s.gate_heads), c.past_g = decays(L * s.gate_heads);
  if (c.gate == routed_case::gate::constant) c.g = decays(s.gate_heads);
  if (c.sink) c.sinks = as_double(stored<accumulator_t<T>>(normals(s.heads)));
}

/// Rows [R, H C] with `gap` numbers of NaN behind each.
template <class T>
std::vector<T> with_gaps(std::vector<double> const& x, index_t rows, index_t gap) {
  std::vector<T> all;
  index_t const width = rows > 0 ? index_t(x.size()) / rows : 0;
  for (index_t r = 0; r < rows; ++r) {
    for (index_t c = 0; c < width; ++c) all.push_back(T(accumulator_t<T>(x[std::size_t(r * width + c)])));
    for (index_t c = 0; c < gap; ++c) all.push_back(T(std::numeric_limits<accumulator_t<T>>::quiet_NaN()));
  }
  return all;
}
template <class T>
view3<T> rows_view(T* data, index_t rows, index_t heads, index_t channels, index_t gap) {
  return {data, {rows, heads, channels}, {heads * channels + gap, channels, 1}};
}

struct routed_result {
  std::vector<double> o, lse, d_q, d_k, d_v, d_g, d_past_k, d_past_v, d_past_g, d_sink;
  std::vector<index_t> choice, choices;
  index_t planned = 0, used = 0;
};

/// Memory of the host as device_array offers that of a device.
template <class T>
struct host_array {
  std::vector<T> memory;
  explicit host_array(std::size_t count) : memory(count) {}
  explicit host_array(std::vector<T> x) : memory(std::move(x)) {}
  T* data() { return memory.data(); }
  std::size_t size() const { return memory.size(); }
  std::vector<T> download() const { return memory; }
};

/// All arrays of a case in one kind of memory, and the views of them.
template <class T, template <class> class Array>
struct routed_arrays {
  using number = accumulator_t<T>;
  Array<T> q, k, v, past_k, past_v, d_o, o, d_q, d_k, d_v, d_past_k, d_past_v;
  Array<number> g, past_g, sink, d_g, d_past_g, d_sink;
  Array<index_t> past_length, choice, choices;
  Array<double> lse;
  attention_input<T> in;
  attention_gradient<T> d;
  attention_record record;
  view3<T> o_rhv;
  view3<T const> d_o_rhv;

  static std::vector<T> filled(std::size_t count) { return std::vector<T>(count, T(number(77))); }
  static std::vector<number> filled_numbers(std::size_t count) { return std::vector<number>(count, number(77)); }
  static std::vector<number> numbers(std::vector<double> const& x) { return stored<number>(x); }

  explicit routed_arrays(routed_case const& c)
      : q(with_gaps<T>(c.q, c.rows(), c.gap)), k(with_gaps<T>(c.k, c.rows(), c.gap)),
        v(with_gaps<T>(c.v, c.rows(), c.gap)), past_k(stored<T>(c.past_k)), past_v(stored<T>(c.past_v)),
        d_o(with_gaps<T>(c.d_o, c.rows(), c.gap)), o(filled(d_o.size())), d_q(filled(q.size())),
        d_k(filled(k.size())), d_v(filled(v.size())), d_past_k(filled(past_k.size())),
        d_past_v(filled(past_v.size())), g(numbers(c.g)), past_g(numbers(c.past_g)), sink(numbers(c.sinks)),
        d_g(filled_numbers(c.g.size())), d_past_g(filled_numbers(c.past_g.size())),
        d_sink(filled_numbers(c.sinks.size())), past_length(c.past), choice(std::size_t(c.rows() * c.shape.heads)),
        choices(std::size_t(c.rows() * c.shape.heads * c.shape.select.top_k)),
        lse(std::size_t(c.rows() * c.shape.heads)) {
    auto const& s = c.shape;
    index_t const R = c.rows(), N = c.count(), L = c.capacity;
    bool const gated = c.gate != routed_case::gate::none, constant = c.gate == routed_case::gate::constant;
    in.q_rhk = rows_view<T const>(q.data(), R, s.heads, s.key_dim, c.gap);
    in.k_rhk = rows_view<T const>(k.data(), R, s.key_heads, s.key_dim, c.gap);
    in.v_rhv = rows_view<T const>(v.data(), R, s.value_heads, s.value_dim, c.gap);
    o_rhv = rows_view<T>(o.data(), R, s.heads, s.value_dim, c.gap);
    d_o_rhv = rows_view<T const>(d_o.data(), R, s.heads, s.value_dim, c.gap);
    d.q_rhk = rows_view<T>(d_q.data(), R, s.heads, s.key_dim, c.gap);
    d.k_rhk = rows_view<T>(d_k.data(), R, s.key_heads, s.key_dim, c.gap);
    d.v_rhv = rows_view<T>(d_v.data(), R, s.value_heads, s.value_dim, c.gap);
    if (gated) {
      in.g_rhk = view3<number const>(g.data(), {constant ? 1 : R, s.gate_heads, 1});
      d.g_rhk = view3<number>(d_g.data(), {constant ? 1 : R, s.gate_heads, 1});
      if (constant) in.g_rhk.stride[0] = d.g_rhk.stride[0] = 0;
    }
    if (c.sink) {
      in.sink_h = view1<number const>(sink.data(), {s.heads});
      d.sink_h = view1<number>(d_sink.data(), {s.heads});
    }
    if (!c.past.empty()) {
      in.past_length = past_length.data();
      in.past_k_nlhk = view4<T const>(past_k.data(), {N, L, s.key_heads, s.key_dim});
      in.past_v_nlhv = view4<T const>(past_v.data(), {N, L, s.value_heads, s.value_dim});
      d.past_k_nlhk = view4<T>(d_past_k.data(), {N, L, s.key_heads, s.key_dim});
      d.past_v_nlhv = view4<T>(d_past_v.data(), {N, L, s.value_heads, s.value_dim});
      if (gated && !constant) {
        in.past_g_nlhk = view4<number const>(past_g.data(), {N, L, s.gate_heads, 1});
        d.past_g_nlhk = view4<number>(d_past_g.data(), {N, L, s.gate_heads, 1});
      }
    }
    record.choice_rh = view2<index_t>(choice.data(), {R, s.heads});
    record.choices_rhk = view3<index_t>(choices.data(), {R, s.heads, s.select.top_k});
    record.lse_rh = view2<double>(lse.data(), {R, s.heads});
  }
  routed_result results() const {
    routed_result r;
    r.o = as_double(o.download());
    r.lse = lse.download();
    r.choice = choice.download();
    r.choices = choices.download();
    r.d_q = as_double(d_q.download());
    r.d_k = as_double(d_k.download());
    r.d_v = as_double(d_v.download());
    r.d_g = as_double(d_g.download());
    r.d_past_k = as_double(d_past_k.download());
    r.d_past_v = as_double(d_past_v.download());
    r.d_past_g = as_double(d_past_g.download());
    r.d_sink = as_double(d_sink.download());
    return r;
  }
};

/// Forward and backward on the device, in memory planned by a dry run and filled with NaN.
template <class Which, class T>
routed_result run_on_device(routed_case const& c, bool backward = true) {
  using kernel = kernels::cuda_routed_attention<Which, T>;
  routed_arrays<T, device_array> a(c);
  device_array<index_t> const offsets(c.offsets);
  auto const both = [&](arena& memory, device::cuda const& dev, attention_gradient<T> const& d) {
    auto const saved = kernel::saved::carve(memory, c.shape);
    kernel::forward(dev, c.shape, a.in, a.o_rhv, backward ? &saved : nullptr, a.record, memory);
    if (backward) kernel::backward(dev, c.shape, a.in, a.o_rhv, saved, a.d_o_rhv, d, memory);
  };
  auto plan = arena::measure();
  both(plan, {.dry = true}, {});
  device_array<unsigned char> const block(std::vector<unsigned char>(std::size_t(plan.peak()), 0xff));
  arena memory(reinterpret_cast<std::byte*>(block.data()), block.size());
  both(memory, {.offsets = offsets.data()}, a.d);
  auto r = a.results();
  r.planned = plan.peak();
  r.used = memory.peak();
  return r;
}

/// The same in double by the kernels of the CPU.
template <class Which>
routed_result run_on_cpu(routed_case const& c) {
  using device_type = device::basic_cpu<portable_isa, serial_threads>;
  routed_arrays<double, host_array> a(c);
  auto const both = [&](arena& memory, device_type dev) {
    auto const saved = kernels::routed_saved<Which, double>::carve(memory, c.shape);
    kernels::routed_attention_forward<Which>(dev, c.shape, a.in, a.o_rhv, &saved, a.record, memory);
    kernels::routed_attention_backward<Which>(dev, c.shape, a.in, a.o_rhv, saved, a.d_o_rhv, a.d, memory);
  };
  auto plan = arena::measure();
  device_type dry;
  dry.dry = true;
  both(plan, dry);
  buffer<std::byte> block(plan.peak());
  arena memory(block);
  both(memory, {});
  return a.results();
}

/// check_close, and NaN exactly where it is wanted.
inline void check_numbers(std::string const& what, std::vector<double> const& got, std::vector<double> const& want,
                          double tolerance) {
  std::size_t other = 0;
  for (std::size_t i = 0; i < got.size() && i < want.size(); ++i)
    other += (got[i] != got[i]) != (want[i] != want[i]);
  check(other == 0, what + ": " + std::to_string(other) + " numbers are NaN, or are not, unlike those wanted");
  check_close(what, got, want, tolerance);
}

/// Slots behind a sequence's past are nobody's: they keep what was there. `decay_tolerance` is that of a gate,
/// whose derivative is a sum over all pairs of tokens.
inline void check_results(std::string const& what, routed_result const& got, routed_result const& want,
                          double output_tolerance, double gradient_tolerance, double decay_tolerance) {
  check(got.used == got.planned,
        what + ": used " + std::to_string(got.used) + " bytes of " + std::to_string(got.planned));
  index_t other = 0;
  for (std::size_t i = 0; i < got.choices.size(); ++i) other += got.choices[i] != want.choices[i];
  check(other == 0 && got.choice == want.choice, what + ": " + std::to_string(other) + " other choices");
  check_numbers(what + ": o", got.o, want.o, output_tolerance);
  check_numbers(what + ": lse", got.lse, want.lse, output_tolerance);
  check_numbers(what + ": d_q", got.d_q, want.d_q, gradient_tolerance);
  check_numbers(what + ": d_k", got.d_k, want.d_k, gradient_tolerance);
  check_numbers(what + ": d_v", got.d_v, want.d_v, gradient_tolerance);
  check_numbers(what + ": d_g", got.d_g, want.d_g, decay_tolerance);
  check_numbers(what + ": d_past_k", got.d_past_k, want.d_past_k, gradient_tolerance);
  check_numbers(what + ": d_past_v", got.d_past_v, want.d_past_v, gradient_tolerance);
  check_numbers(what + ": d_past_g", got.d_past_g, want.d_past_g, decay_tolerance);
  check_numbers(what + ": d_sink", got.d_sink, want.d_sink, gradient_tolerance);
}

/// Tolerances of sixteen bits. Weights and derivatives of scores are rounded on their way to a product, outputs and
/// derivatives once more: half a unit of the last place each, relative to their own size. So an output is off by
/// two of them relative to the greatest value; a derivative by as much of each term of a sum that may cancel.
struct half_tolerance {
  double output, gradient, decay;
};
template <class T>
constexpr double last_place = std::is_same_v<T, bfloat16> ? 0x1p-8 : 0x1p-11;
template <class T>
constexpr half_tolerance half_bits{2 * last_place<T>, 6 * last_place<T>, 16 * last_place<T>};

}  // namespace seqmix::testing
