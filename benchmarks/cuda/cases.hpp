#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "../support/flops.hpp"
#include "measure.hpp"
#include <seqmix/kernels/cuda_kernels.hpp>
#include <seqmix/selectors/select.hpp>

/// One case for each family of kernels: its memory, its inputs and what its shape needs.
namespace seqmix::benchmarks {

template <class T>
char const* short_name() {
  return sizeof(T) == 4 ? "f32" : "bf16";
}
template <class T, std::size_t Rank>
void fill_bell(view<T, Rank> x, std::uint32_t seed, float scale = 1.0F) {
  fill_normal(x.data, x.size(), seed, scale);
}
template <class T, std::size_t Rank>
void fill_even(view<T, Rank> x, std::uint32_t seed, float low, float high) {
  fill_uniform(x.data, x.size(), seed, low, high);
}

/// Products of sixteen-bit numbers are the matrix units' work, those of floats are plain multiply-adds.
template <class T>
work products(double bytes, double flops, double exponentials = 0) {
  return {.bytes = bytes,
          .matrix = sizeof(T) == 2 ? flops : 0,
          .multiply_add = sizeof(T) == 2 ? 0 : flops,
          .exponentials = exponentials};
}

/// Sizes that all cases have: a batch of equal sequences.
struct batch {
  index_t count = 1, length = 1;
  sequences rows() const { return sequences::batch(count, length); }
};

// ---- attention

/// What a query of a selector sees.
enum class sees { all_keys, one_key, own_and_one_chunk };

struct attention_sizes {
  batch in;
  index_t heads, dim, chunk;
  index_t past = 0;      ///< keys of the past in front of every sequence
  bool training = true;  ///< keeps what a backward needs
};

template <class Kernel, sees Sees, class T>
struct attention_case {
  static constexpr bool has_directions = true;
  static std::string type_name() { return short_name<T>(); }

  attention_case(arena& memory, attention_sizes const& given) : sizes(given) {
    shape.seq = given.in.rows();
    shape.heads = shape.key_heads = shape.value_heads = shape.gate_heads = given.heads;
    shape.key_dim = shape.value_dim = given.dim;
    shape.scale = 1.0 / std::sqrt(double(given.dim));
    shape.select.chunk = given.chunk;
    for (auto* x : {&q, &k, &v, &o, &d_o, &d_q, &d_k, &d_v})
      *x = memory.take_view<T, 3>({shape.seq.rows(), given.heads, given.dim});
    if (given.past > 0) {
      for (auto* x : {&past_k, &past_v})
        *x = memory.take_view<T, 4>({given.in.count, given.past, given.heads, given.dim});
      past_length = memory.take<index_t>(given.in.count);
    }
    keep = Kernel::saved::carve(memory, shape);
  }
  void fill() {
    std::uint32_t seed = 1;
    for (auto const& x : {q, k, v, d_o}) fill_bell(x, seed++);
    if (sizes.past == 0) return;
    for (auto const& x : {past_k, past_v}) fill_bell(x, seed++);
    std::vector<index_t> const lengths(std::size_t(sizes.in.count), sizes.past);
    expect(cudaMemcpy(past_length, lengths.data(), lengths.size() * sizeof(index_t), cudaMemcpyHostToDevice),
           "cudaMemcpy");
  }
  void run(bool backward, device::cuda const& dev, arena& ws) {
    arena_scope const room(ws);
    attention_input<T> in{q, k, v};
    if (sizes.past > 0) {
      in.past_k_nlhk = past_k;
      in.past_v_nlhv = past_v;
      in.past_length = past_length;
    }
    if (backward)
      Kernel::backward(dev, shape, in, o, keep, d_o, {d_q, d_k, d_v}, ws);
    else
      Kernel::forward(dev, shape, in, o, sizes.training ? &keep : nullptr, {}, ws);
  }
  /// Each tensor once: q, k, v and o; backward also d_o and three results. A past is read once a sequence.
  work need(bool backward) const {
    double const tensor = double(q.size()) * sizeof(T),
                 past = double(sizes.past * sizes.in.count * sizes.heads * sizes.dim) * sizeof(T);
    double const pairs = double(sizes.in.count) * visible_pairs();
    bool const soft = Sees != sees::one_key || sizes.training;
    double const flops = soft ? attention_flops(pairs, sizes.heads, sizes.dim, sizes.dim)
                              : hard_attention_flops(pairs, sizes.heads, sizes.dim);
    return products<T>(tensor * (backward ? 8 : 4) + past * (soft ? 2 : 1),
                       backward ? backward_flops(flops) : flops, soft ? pairs * double(sizes.heads) : 0);
  }
  template <class Look>
  void check(bool backward, Look const& look) const {
    if (!backward) return look(o.data, o.size());
    for (auto const& x : {d_q, d_k, d_v}) look(x.data, x.size());
  }

  attention_sizes sizes;
  attention_shape shape;
  view3<T> q, k, v, o, d_o, d_q, d_k, d_v;
  view4<T> past_k, past_v;
  index_t* past_length = nullptr;
  typename Kernel::saved keep;

 private:
  double visible_pairs() const {
    double const past = double(sizes.past) * double(sizes.in.length);
    if (Sees != sees::own_and_one_chunk) return causal_pairs(sizes.in.length) + past;
    if (sizes.past == 0) return chunk_pairs(sizes.in.length, sizes.chunk);
    return double(sizes.in.length) * double(std::min(2 * sizes.chunk, sizes.past));
  }
};

/// The same for a single query behind a past: no directions, and its name says step.
template <class Kernel, sees Sees, class T>
struct attention_step_case : attention_case<Kernel, Sees, T> {
  static constexpr bool has_directions = false;
  using attention_case<Kernel, Sees, T>::attention_case;
};

// ---- the linear family

struct recurrence_sizes {
  batch in{};
  index_t heads, key_heads, key_dim, value_dim;
  bool per_channel = false, beta = false, write = false;
  bool with_state = false;  ///< begins from a state and gives the last one
};

template <class Kernel, class T>
struct recurrence_case {
  static constexpr bool has_directions = true;
  static std::string type_name() { return short_name<T>(); }

  recurrence_case(arena& memory, recurrence_sizes const& given) : sizes(given) {
    shape.seq = given.in.rows();
    shape.heads = shape.value_heads = shape.gate_heads = given.heads;
    shape.query_heads = shape.key_heads = given.key_heads;
    shape.key_dim = given.key_dim;
    shape.value_dim = given.value_dim;
    shape.scale = 1.0 / std::sqrt(double(given.key_dim));
    index_t const R = shape.seq.rows(), decays = given.per_channel ? given.key_dim : 1;
    for (auto* x : {&q, &k, &d_q, &d_k}) *x = memory.take_view<T, 3>({R, given.key_heads, given.key_dim});
    for (auto* x : {&v, &o, &d_o, &d_v}) *x = memory.take_view<T, 3>({R, given.heads, given.value_dim});
    for (auto* x : {&g, &d_g}) *x = memory.take_view<float, 3>({R, given.heads, decays});
    if (given.write)
      for (auto* x : {&write, &d_write}) *x = memory.take_view<float, 2>({R, given.heads});
    if (given.beta)
      for (auto* x : {&beta, &d_beta}) *x = memory.take_view<float, 2>({R, given.heads});
    if (given.with_state)
      for (auto* x : {&first, &last})
        *x = memory.take_view<float, 4>({given.in.count, given.heads, given.key_dim, given.value_dim});
    keep = Kernel::carve(memory, shape);
  }
  void fill() {
    std::uint32_t seed = 1;
    // Keys of length one, as the delta rule has them.
    fill_bell(k, seed++, float(1.0 / std::sqrt(double(sizes.key_dim))));
    for (auto const& x : {q, v, d_o}) fill_bell(x, seed++);
    fill_even(g, seed++, -0.2F, -0.001F);
    for (auto const& x : {write, beta}) fill_even(x, seed++, 0.0F, 1.0F);
    fill_bell(first, seed);
  }
  void run(bool backward, device::cuda const& dev, arena& ws) {
    arena_scope const room(ws);
    recurrence_input<T> const in{
        .q_rhk = q, .k_rhk = k, .v_rhv = v, .g_rhk = g, .write_rh = write, .beta_rh = beta, .initial_nhkv = first};
    if (backward)
      Kernel::backward(
          dev, shape, in, keep, d_o, {},
          {.q_rhk = d_q, .k_rhk = d_k, .v_rhv = d_v, .g_rhk = d_g, .write_rh = d_write, .beta_rh = d_beta}, ws);
    else
      Kernel::forward(dev, shape, in, o, sizes.with_state ? nullptr : &keep, last, ws);
  }
  /// Each tensor once; backward reads d_o for o and writes a derivative of every input.
  work need(bool backward) const {
    double const inputs = double(q.size() + k.size() + v.size()) * sizeof(T) +
                          double(g.size() + write.size() + beta.size()) * sizeof(float);
    double const bytes = inputs * (backward ? 2 : 1) + double(o.size()) * sizeof(T) +
                         double(first.size() + last.size()) * sizeof(float);
    double flops = recurrence_flops(shape.seq.rows(), sizes.heads, sizes.key_dim, sizes.value_dim);
    // The delta rule reads the state once more, with the key.
    if (sizes.beta) flops *= 1.5;
    return products<T>(bytes, backward ? backward_flops(flops) : flops);
  }
  template <class Look>
  void check(bool backward, Look const& look) const {
    if (!backward) return look(o.data, o.size());
    for (auto const& x : {d_q, d_k, d_v}) look(x.data, x.size());
    look(d_g.data, d_g.size());
  }

  recurrence_sizes sizes;
  recurrence_shape shape;
  view3<T> q, k, v, o, d_o, d_q, d_k, d_v;
  view3<float> g, d_g;
  view2<float> write, beta, d_write, d_beta;
  view4<float> first, last;
  typename Kernel::saved keep;
};
template <class Kernel, class T>
struct recurrence_step_case : recurrence_case<Kernel, T> {
  static constexpr bool has_directions = false;
  using recurrence_case<Kernel, T>::recurrence_case;
};

// ---- Mamba-1's scan

struct scan_sizes {
  batch in;
  index_t channels, states;
  bool with_state = false;
};

template <class T>
struct scan_case {
  using kernel = kernels::cuda_selective_scan<T>;
  static constexpr bool has_directions = true;
  static std::string type_name() { return short_name<T>(); }

  scan_case(arena& memory, scan_sizes const& given) : sizes(given) {
    shape = {.seq = given.in.rows(), .channels = given.channels, .states = given.states, .groups = 1};
    index_t const R = shape.seq.rows();
    for (auto* x : {&u, &delta, &z, &y, &d_u, &d_delta, &d_z, &d_y})
      *x = memory.take_view<T, 2>({R, given.channels});
    for (auto* x : {&b, &c, &d_b, &d_c}) *x = memory.take_view<T, 3>({R, 1, given.states});
    for (auto* x : {&a_log, &d_a_log}) *x = memory.take_view<float, 2>({given.channels, given.states});
    for (auto* x : {&bias, &skip, &d_bias, &d_skip}) *x = memory.take_view<float, 1>({given.channels});
    if (given.with_state)
      for (auto* x : {&first, &last})
        *x = memory.take_view<float, 3>({given.in.count, given.channels, given.states});
    keep = kernel::carve(memory, shape);
  }
  void fill() {
    std::uint32_t seed = 1;
    for (auto const& x : {u, z, d_y}) fill_bell(x, seed++);
    for (auto const& x : {b, c}) fill_bell(x, seed++);
    fill_bell(delta, seed++, 0.5F);
    fill_even(a_log, seed++, 0.0F, float(std::log(double(sizes.states))));
    fill_even(bias, seed++, -6.0F, -2.0F);
    fill_even(skip, seed++, 0.5F, 1.5F);
    for (auto const& x : {d_bias, d_skip}) fill_even(x, 0, 0.0F, 0.0F);
    fill_even(d_a_log, 0, 0.0F, 0.0F);
    fill_bell(first, seed);
  }
  void run(bool backward, device::cuda const& dev, arena& ws) {
    arena_scope const room(ws);
    selective_scan_input<T> const in{.u_rd = u,
                                     .delta_rd = delta,
                                     .z_rd = z,
                                     .b_rgk = b,
                                     .c_rgk = c,
                                     .a_log_dk = a_log,
                                     .delta_bias_d = bias,
                                     .skip_d = skip,
                                     .initial_ndk = first};
    if (backward)
      kernel::backward(dev, shape, in, keep, d_y, {},
                       {.u_rd = d_u,
                        .delta_rd = d_delta,
                        .z_rd = d_z,
                        .b_rgk = d_b,
                        .c_rgk = d_c,
                        .a_log_dk = d_a_log,
                        .delta_bias_d = d_bias,
                        .skip_d = d_skip},
                       ws);
    else
      kernel::forward(dev, shape, in, y, sizes.with_state ? nullptr : &keep, last, ws);
  }
  /// Each tensor once: u, delta, z, B, C and y; backward reads d_y for y and writes a derivative of every input.
  /// For every state one exponential and three multiply-adds forward, twice as many backward.
  work need(bool backward) const {
    double const inputs = double(3 * u.size() + 2 * b.size()) * sizeof(T);
    double const states = double(u.size()) * double(sizes.states);
    return {.bytes = inputs * (backward ? 2 : 1) + double(y.size()) * sizeof(T) +
                     double(first.size() + last.size()) * sizeof(float),
            .multiply_add = backward ? backward_flops(6 * states) : 6 * states,
            .exponentials = states};
  }
  template <class Look>
  void check(bool backward, Look const& look) const {
    if (!backward) return look(y.data, y.size());
    for (auto const& x : {d_u, d_delta, d_z}) look(x.data, x.size());
    for (auto const& x : {d_b, d_c}) look(x.data, x.size());
    look(d_a_log.data, d_a_log.size());
  }

  scan_sizes sizes;
  selective_scan_shape shape;
  view2<T> u, delta, z, y, d_u, d_delta, d_z, d_y;
  view3<T> b, c, d_b, d_c;
  view2<float> a_log, d_a_log;
  view1<float> bias, skip, d_bias, d_skip;
  view3<float> first, last;
  selective_scan_saved<float> keep;
};
template <class T>
struct scan_step_case : scan_case<T> {
  static constexpr bool has_directions = false;
  using scan_case<T>::scan_case;
};

}  // namespace seqmix::benchmarks
