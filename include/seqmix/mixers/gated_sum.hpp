#pragma once

#include <array>
#include <tuple>
#include <utility>

#include <seqmix/mixers/mixer.hpp>
#include <seqmix/tensor/parallel_for.hpp>

namespace seqmix::inline v0 {

namespace mixer_detail {

/// True for a mixer in which every token can be selected from the whole sequence: history, full reach, non-uniform.
template <class M>
inline constexpr bool reaches_everything =
    M::state_type::spec.kind == state_kind::history&& M::selector_type::which_type::spec
                                    .full_sequence&& M::selector_type::how_type::spec.non_uniform;

/// The first such member, or the first of all: whose policies stand for the sum.
template <class... Mixers>
consteval std::size_t telling_member() {
  std::array<bool, sizeof...(Mixers)> const reaches{reaches_everything<Mixers>...};
  for (std::size_t i = 0; i < reaches.size(); ++i)
    if (reaches[i]) return i;
  return 0;
}

/// The numbers of a selection that a member reads; the others are those of its neighbours.
template <class M>
mixer_shape member_shape(mixer_shape s) {
  constexpr auto spec = M::selector_type::which_type::spec;
  if (!spec.routed) s.select.shared_choice = false;
  if (!spec.several) s.select.top_k = 1;
  if (!(spec.routed && scores_by_mean(spec.score) && !spec.by_compression)) s.select.router_bias = false;
  return s;
}

/// f(derivative, input) for every pair of views of a gradient and the input it belongs to, the mix left out.
template <class T, class F>
void for_views(mixer_gradient<T>& d, mixer_input<T> const& in, F const& f) {
  f(d.q_rhk, in.q_rhk), f(d.k_rhk, in.k_rhk), f(d.v_rhv, in.v_rhv), f(d.g_rhk, in.g_rhk);
  f(d.write_rh, in.write_rh), f(d.beta_rh, in.beta_rh), f(d.a_rhk, in.a_rhk), f(d.b_rhk, in.b_rhk);
  f(d.rate_hk, in.rate_hk), f(d.bonus_hk, in.bonus_hk), f(d.sink_h, in.sink_h);
}

/// f(index of the first axis) in parallel; an axis of stride 0 is one row.
template <class Device, class T, std::size_t Rank, class F>
void for_rows(Device dev, view<T, Rank> const& x, F const& f) {
  if (!x) return;
  parallel_for(dev, x.stride[0] == 0 ? (std::min)(x.extent[0], index_t(1)) : x.extent[0],
               [&](index_t r, int) { f(r); });
}
/// f(number, others there ...) for every number of one row.
template <class F, class T, class... View>
void for_numbers_of_row(index_t r, F const& f, view<T, 1> const& x, View const&... other) {
  f(x(r), other(r)...);
}
template <class F, class T, class... View>
void for_numbers_of_row(index_t r, F const& f, view<T, 2> const& x, View const&... other) {
  for (index_t c = 0; c < x.extent[1]; ++c) f(x(r, c), other(r, c)...);
}
template <class F, class T, class... View>
void for_numbers_of_row(index_t r, F const& f, view<T, 3> const& x, View const&... other) {
  for (index_t h = 0; h < x.extent[1]; ++h)
    for (index_t c = 0; c < x.extent[2]; ++c) f(x(r, h, c), other(r, h, c)...);
}

}  // namespace mixer_detail

/// o = sum over members m of mix_m o_m, with a weight mix [R,H,members] per row and head handed in: several mixers
/// over the same queries, keys, values and gate. Each member reads of `select` what it asks for; its state and what
/// it saves are its own. State: those of the members. Saved: those of the members, and their outputs. Deterministic
/// as the members are; the sum is in their order.
template <mixer_type... Mixers>
struct gated_sum {
  static_assert(sizeof...(Mixers) >= 1, "seqmix pairing: a gated sum needs at least one member");
  static constexpr std::size_t count = sizeof...(Mixers);
  using members = std::tuple<Mixers...>;
  using telling = std::tuple_element_t<mixer_detail::telling_member<Mixers...>(), members>;
  /// The policies that stand for the sum: those of the member with the widest reach.
  using state_type = typename telling::state_type;
  using gate_type = typename telling::gate_type;
  using selector_type = typename telling::selector_type;
  static_assert((std::is_same_v<gate_type, typename Mixers::gate_type> && ...),
                "seqmix pairing: the members of a gated sum read the same log-decays; give all of them one gate");

  static std::string name() {
    std::string text = "gated_sum[";
    for_each([&]<std::size_t I, class M>() { text += (I > 0 ? "+" : "") + M::name(); });
    return text + "]";
  }

  /// f.template operator()<index, member>() for every member in order.
  template <class F>
  static void for_each(F const& f) {
    [&]<std::size_t... I>(std::index_sequence<I...>) { (f.template operator()<I, Mixers>(), ...); }
    (std::index_sequence_for<Mixers...>{});
  }

  template <class T>
  struct state {
    std::tuple<typename Mixers::template state<T>...> member;

    static state carve(arena& a, mixer_shape const& s) {
      state all;
      for_each([&]<std::size_t I, class M>() {
        std::get<I>(all.member) = M::template state<T>::carve(a, mixer_detail::member_shape<M>(s));
      });
      return all;
    }
    static index_t elements(mixer_shape const& s) {
      return (Mixers::template state<T>::elements(mixer_detail::member_shape<Mixers>(s)) + ...);
    }
    void clear() {
      std::apply([](auto&... m) { (m.clear(), ...); }, member);
    }
  };

  template <class T>
  struct saved {
    std::tuple<typename Mixers::template saved<T>...> member;
    std::array<view3<T>, count> o_rhv;

    template <class Isa>
    static saved carve(arena& a, mixer_shape const& s) {
      saved all;
      for_each([&]<std::size_t I, class M>() {
        std::get<I>(all.member) = M::template saved<T>::template carve<Isa>(a, mixer_detail::member_shape<M>(s));
        all.o_rhv[I] = output(a, s);
      });
      return all;
    }

   private:
    static view3<T> output(arena& a, mixer_shape const& s) {
      return a.take_view<T, 3>({s.seq.rows(), s.heads, s.value_dim});
    }
  };

  /// Errors: shape_error for a mix that is not [R,H,members], and those of the members.
  template <class Device, class T>
  static void forward(Device dev, mixer_shape const& s, mixer_input<T> const& in, view3<same<T>> o_rhv,
                      state<same<T>> const* before, state<same<T>>* after, saved<same<T>> const* keep, arena& ws) {
    expect_mix(s, in);
    arena_scope const scope(ws);
    auto const scratch = keep ? view3<T>{} : ws.take_view<T, 3>({s.seq.rows(), s.heads, s.value_dim});
    for_each([&]<std::size_t I, class M>() {
      view3<T> const part = keep ? keep->o_rhv[I] : scratch;
      M::forward(dev, mixer_detail::member_shape<M>(s), in, part, before ? &std::get<I>(before->member) : nullptr,
                 after ? &std::get<I>(after->member) : nullptr, keep ? &std::get<I>(keep->member) : nullptr, ws);
      parallel_for(dev, s.seq.rows(), [&](index_t r, int) {
        for (index_t h = 0; h < s.heads; ++h)
          for (index_t c = 0; c < s.value_dim; ++c) {
            T const x = in.mix_rhn(r, h, index_t(I)) * part(r, h, c);
            o_rhv(r, h, c) = I == 0 ? x : o_rhv(r, h, c) + x;
          }
      });
    });
  }

  template <class Isa, class Threads, class T>
  static void backward(device::basic_cpu<Isa, Threads> dev, mixer_shape const& s, mixer_input<T> const& in,
                       view3<same<T> const>, saved<same<T>> const& keep, view3<same<T> const> d_o_rhv,
                       state<same<T>> const* before, state<same<T>> const* d_after,
                       mixer_gradient<same<T>> const& d, state<same<T>>* d_before, arena& ws) {
    expect_mix(s, in);
    if (!dev.dry)
      expect_shape("gated sum, derivative of the mix", d.mix_rhn, {s.seq.rows(), s.heads, index_t(count)});
    arena_scope const scope(ws);
    auto const d_part_rhv = ws.take_view<T, 3>({s.seq.rows(), s.heads, s.value_dim});
    auto const d_part = gradient_like(in, ws);
    auto total = d;
    if (!dev.dry) clear(dev, total, in);
    for_each([&]<std::size_t I, class M>() {
      parallel_for(dev, s.seq.rows(), [&](index_t r, int) {
        for (index_t h = 0; h < s.heads; ++h) {
          T const mix = in.mix_rhn(r, h, index_t(I));
          T sum(0);
          for (index_t c = 0; c < s.value_dim; ++c) {
            sum += d_o_rhv(r, h, c) * keep.o_rhv[I](r, h, c);
            d_part_rhv(r, h, c) = mix * d_o_rhv(r, h, c);
          }
          d.mix_rhn(r, h, index_t(I)) = sum;
        }
      });
      auto part = d_part;
      if (!dev.dry) clear(dev, part, in);
      M::backward(dev, mixer_detail::member_shape<M>(s), in, view3<T const>(keep.o_rhv[I]),
                  std::get<I>(keep.member), view3<T const>(d_part_rhv),
                  before ? &std::get<I>(before->member) : nullptr,
                  d_after ? &std::get<I>(d_after->member) : nullptr, part,
                  d_before ? &std::get<I>(d_before->member) : nullptr, ws);
      if (!dev.dry) add(dev, total, part);
    });
  }

 private:
  template <class T>
  static void expect_mix(mixer_shape const& s, mixer_input<T> const& in) {
    expect_shape("gated sum, mix", in.mix_rhn, {s.seq.rows(), s.heads, index_t(count)});
  }
  /// Dense room for a member's derivatives, planned by the extents of the input.
  template <class T>
  static mixer_gradient<T> gradient_like(mixer_input<T> const& in, arena& ws) {
    mixer_gradient<T> d;
    mixer_detail::for_views(d, in, [&]<std::size_t Rank>(view<T, Rank>& to, view<T const, Rank> const& like) {
      bool const constant = like.stride[0] == 0;
      auto extent = like.extent;
      if (constant) extent[0] = (std::min)(extent[0], index_t(1));
      to.extent = like.extent;
      if (like.extent == decltype(extent){}) return;  // none
      to = ws.take_view<T, Rank>(extent);
      to.extent = like.extent;
      if (constant) to.stride[0] = 0;
    });
    return d;
  }
  template <class Device, class T>
  static void clear(Device dev, mixer_gradient<T>& d, mixer_input<T> const& in) {
    mixer_detail::for_views(d, in, [&]<std::size_t Rank>(view<T, Rank>& x, view<T const, Rank> const&) {
      mixer_detail::for_rows(dev, x, [&](index_t r) {
        mixer_detail::for_numbers_of_row(
            r, [](T& e) { e = T(0); }, x);
      });
    });
  }
  template <class Device, class T>
  static void add(Device dev, mixer_gradient<T>& d, mixer_gradient<T> const& part) {
    mixer_input<T> const view_of_part{part.q_rhk,    part.k_rhk,    part.v_rhv, part.g_rhk,
                                      part.write_rh, part.beta_rh,  part.a_rhk, part.b_rhk,
                                      part.rate_hk,  part.bonus_hk, part.sink_h};
    mixer_detail::for_views(d, view_of_part, [&]<std::size_t Rank>(view<T, Rank>& x, view<T const, Rank> const& y) {
      mixer_detail::for_rows(dev, x, [&](index_t r) {
        mixer_detail::for_numbers_of_row(
            r, [](T& e, T const& more) { e += more; }, x, y);
      });
    });
  }
};

}  // namespace seqmix::inline v0
