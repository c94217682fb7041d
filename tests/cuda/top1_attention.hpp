#pragma once

#include "attention.hpp"
#include <seqmix/selectors/top1.hpp>

/// One Top-1 attention on the device and on the CPU in double, from the same stored numbers; settings, numbers and
/// memory are those of the softmax attention.
namespace seqmix::testing {

using selectors::top1;
using selectors::top1_gradient;
using selectors::top1_output;

struct top1_knobs {
  double forward_temperature = 0.0, hard_fraction = 1.0;

  attention_shape applied_to(attention_shape s) const {
    s.knobs.forward_temperature = forward_temperature;
    s.knobs.hard_fraction = hard_fraction;
    return s;
  }
};

struct top1_results : attention_results {
  std::vector<index_t> choice;
};

/// run(shape, memory, record) fills the memory's results.
template <class T, template <class> class Memory, class Run>
top1_results results_of(attention_setting const& c, top1_knobs const& knobs, attention_memory<T, Memory> const& m,
                        Run const& run) {
  auto const s = knobs.applied_to(m.shape());
  Memory<index_t> const choice(std::vector<index_t>(std::size_t(s.seq.rows() * s.heads), -7));
  auto record = m.record();
  record.choice_rh = {choice.data(), {s.seq.rows(), s.heads}};
  run(s, record);
  top1_results r{m.results(), choice.download()};
  for (index_t x : r.choice) check(x >= -1, c.name + ": every row has a choice");
  return r;
}

template <class Which, class How>
top1_results top1_oracle(attention_setting const& c, top1_knobs const& knobs, attention_numbers const& x,
                         bool backward) {
  attention_memory<double, host_array> const m(c, x, 0);
  return results_of(c, knobs, m, [&](attention_shape const& s, attention_record const& record) {
    device::cpu const dev{};
    arena ws = arena::growing();
    auto const saved = kernels::attention_saved<How, double>::carve(ws, s);
    kernels::attention_forward<Which, How>(dev, s, m.input(), m.output(), backward ? &saved : nullptr, record, ws);
    if (backward)
      kernels::attention_backward<Which, How>(dev, s, m.input(), m.output(), saved, m.upstream(), m.gradient(), ws);
  });
}

/// Scratch is planned by a dry run; a plan that is too small throws, one that is too large is reported.
template <class Which, class How, class T>
top1_results top1_on_device(attention_setting const& c, top1_knobs const& knobs, attention_numbers const& x,
                            bool backward) {
  using kernel = kernels::cuda_top1<Which, How, T>;
  attention_memory<T, device_array> const m(c, x, c.padding);
  return results_of(c, knobs, m, [&](attention_shape const& s, attention_record const& record) {
    device::cuda dev, dry;
    dev.offsets = m.offsets();
    dry.dry = true;
    auto const run = [&](arena& a, device::cuda const& d) {
      auto const saved = kernel::saved::carve(a, s);
      kernel::forward(d, s, m.input(), m.output(), backward ? &saved : nullptr, record, a);
      if (backward) kernel::backward(d, s, m.input(), m.output(), saved, m.upstream(), m.gradient(), a);
    };
    arena measured = arena::measure();
    run(measured, dry);
    device_arena real([&](arena& a) { run(a, dry); });
    run(real.pieces(), dev);
    check(real.pieces().peak() == measured.peak(), c.name + ": a dry run plans what is used");
  });
}

/// An output and a surrogate that both devices know.
template <class T>
struct top1_kernels {
  using run = top1_results (*)(attention_setting const&, top1_knobs const&, attention_numbers const&, bool);
  std::string name;
  top1_output output;
  top1_gradient gradient;
  run device, oracle;

  template <class Which, top1_output Output, top1_gradient Gradient>
  static top1_kernels of() {
    using How = top1<Output, Gradient>;
    return {How::details(), Output, Gradient, &top1_on_device<Which, How, T>, &top1_oracle<Which, How>};
  }
};

inline void compare_top1(std::string const& name, attention_setting const& c, top1_results const& got,
                         top1_results const& want, attention_tolerance const& tolerance, bool backward) {
  check(got.choice == want.choice, name + ": the same choices");
  check_close(name + ": o", got.o, want.o, tolerance.output);
  // The log-sum-exp itself is float everywhere.
  check_close(name + ": lse", got.lse, want.lse, 1e-6 * (c.score_size + 2));
  if (!backward) return;
  check_close(name + ": d_q", got.d_q, want.d_q, tolerance.gradient);
  if (!c.alone) check_close(name + ": d_k", got.d_k, want.d_k, tolerance.gradient);
  if (!c.alone) check_close(name + ": d_v", got.d_v, want.d_v, tolerance.gradient);
  check_close(name + ": d_past_k", got.d_past_k, want.d_past_k, tolerance.gradient);
  check_close(name + ": d_past_v", got.d_past_v, want.d_past_v, tolerance.gradient);
  check_close(name + ": d_g", got.d_g, want.d_g, tolerance.gradient);
  check_close(name + ": d_past_g", got.d_past_g, want.d_past_g, tolerance.gradient);
}

template <class T>
void compare_top1(top1_kernels<T> const& f, attention_setting const& c, attention_tolerance const& tolerance,
                  top1_knobs const& knobs = {}, bool backward = true,
                  std::function<void(attention_numbers&)> const& change = {}) {
  attention_numbers raw(c);
  if (change) change(raw);
  auto const x = raw.template rounded<T>();
  compare_top1(c.name + ", " + f.name, c, f.device(c, knobs, x, backward), f.oracle(c, knobs, x, backward),
               tolerance, backward);
}

inline bool same_bits(std::vector<double> const& a, std::vector<double> const& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}
inline bool same_bits(top1_results const& a, top1_results const& b) {
  return a.choice == b.choice && same_bits(a.o, b.o) && same_bits(a.lse, b.lse) && same_bits(a.d_q, b.d_q) &&
         same_bits(a.d_k, b.d_k) && same_bits(a.d_v, b.d_v) && same_bits(a.d_past_k, b.d_past_k) &&
         same_bits(a.d_past_v, b.d_past_v) && same_bits(a.d_g, b.d_g) && same_bits(a.d_past_g, b.d_past_g);
}

inline attention_setting batch_setting(std::string name, index_t count, index_t length, index_t heads,
                                       index_t key_dim, index_t value_dim) {
  attention_setting c{std::move(name)};
  c.count = count;
  c.length = length;
  c.heads = c.key_heads = c.value_heads = c.gate_heads = heads;
  c.key_dim = key_dim;
  c.value_dim = value_dim;
  return c;
}
inline attention_setting packed_setting(std::string name, std::vector<index_t> offsets, index_t heads,
                                        index_t key_dim, index_t value_dim) {
  auto c = batch_setting(std::move(name), 1, 1, heads, key_dim, value_dim);
  c.offsets = std::move(offsets);
  return c;
}

/// Every row of a batch alone, its keys and values as past ones [N, capacity, H, C] of which position t sees t and
/// its own: decoding, whose keys are split over blocks where they are many. Gated by g per token.
template <class Which, class How, class T>
top1_results top1_by_steps(attention_setting const& c, top1_knobs const& knobs, attention_numbers const& x,
                           std::vector<index_t> const& positions) {
  using kernel = kernels::cuda_top1<Which, How, T>;
  auto const whole = knobs.applied_to(c.shape());
  index_t const N = c.count, length = c.length, H = whole.heads;
  device_array<T> const q(stored<T>(x.q)), k(stored<T>(x.k)), v(stored<T>(x.v)),
      o(std::size_t(N * length * H * whole.value_dim));
  device_array<float> const g(stored<float>(x.g));
  device_array<index_t> const choice(std::size_t(N * length * H));
  device_array<index_t> past(static_cast<std::size_t>(N));
  auto step = whole;
  step.seq = sequences::batch(N, 1);
  // Row t of every sequence.
  auto const rows = [&](auto const& a, index_t t, index_t heads, index_t channels) {
    using U = std::remove_pointer_t<decltype(a.data())>;
    return view3<U>(a.data() + t * heads * channels, {N, heads, channels},
                    {length * heads * channels, channels, 1});
  };
  device::cuda dev, dry;
  dry.dry = true;
  auto const forward = [&](device::cuda const& d, index_t t, arena& ws) {
    attention_input<T> in;
    in.q_rhk = rows(q, t, H, step.key_dim);
    in.k_rhk = rows(k, t, step.key_heads, step.key_dim);
    in.v_rhv = rows(v, t, step.value_heads, step.value_dim);
    in.past_k_nlhk = k.template as<4>({N, length, step.key_heads, step.key_dim});
    in.past_v_nlhv = v.template as<4>({N, length, step.value_heads, step.value_dim});
    if (c.gate == gate_kind::per_token) {
      in.g_rhk = rows(g, t, step.gate_heads, 1);
      in.past_g_nlhk = g.as<4>({N, length, step.gate_heads, 1});
    }
    in.past_length = past.data();
    attention_record record;
    record.choice_rh = {choice.data() + t * H, {N, H}, {length * H, 1}};
    kernel::forward(d, step, in, rows(o, t, H, step.value_dim), nullptr, record, ws);
  };
  device_arena ws([&](arena& a) { forward(dry, 0, a); });
  for (index_t t : positions) {
    past.upload(std::vector<index_t>(std::size_t(N), t));
    forward(dev, t, ws.pieces());
  }
  top1_results r;
  r.o = as_double(o.download());
  r.choice = choice.download();
  return r;
}

}  // namespace seqmix::testing
