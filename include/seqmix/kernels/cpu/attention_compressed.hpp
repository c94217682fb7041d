#pragma once

#include <seqmix/kernels/cpu/attention.hpp>

/// Attention to the means of complete chunks of keys and values: the means are formed first, and read by the tiled
/// attention as keys of their own.
namespace seqmix::inline v0::kernels {

namespace detail {

/// The means of one call: [N,L,Hk,K] and [N,L,Hv,V], how many each sequence has, and where its rows begin.
template <class T>
struct chunk_means {
  view4<T> k_nlhk, v_nlhv;
  index_t *count, *position;

  static chunk_means carve(arena& a, attention_shape const& s, index_t tokens) {
    index_t const N = s.seq.count(), most = tokens / s.select.chunk;
    chunk_means m;
    m.k_nlhk = a.take_view<T, 4>({N, most, s.key_heads, s.key_dim});
    m.v_nlhv = a.take_view<T, 4>({N, most, s.value_heads, s.value_dim});
    m.count = a.take<index_t>(N);
    m.position = a.take<index_t>(N);
    return m;
  }
  attention_input<T> read_by(attention_input<T> const& in) const noexcept {
    attention_input<T> x;
    x.q_rhk = in.q_rhk;
    x.past_k_nlhk = k_nlhk;
    x.past_v_nlhv = v_nlhv;
    x.past_length = count;
    x.sink_h = in.sink_h;
    x.queries_alone = true;
    x.position = position;
    return x;
  }
};

/// Token j of a sequence, past ones first.
template <class T>
T* token_at(attention_shape const& s, index_t n, index_t past, view4<T> const& before, view3<T> const& rows,
            index_t j, index_t h) noexcept {
  return j < past ? before.at(n, j, h) : rows.at(s.seq.begin(n) + j - past, h);
}

/// Sums in the order of tokens and one true division, as the router's means.
template <class Device, class T>
chunk_means<T> average_chunks(Device dev, attention_shape const& s, attention_input<T> const& in, arena& ws) {
  auto const m = chunk_means<T>::carve(ws, s, longest_with_past(s, in, dev.dry));
  index_t const B = s.select.chunk;
  parallel_for(dev, s.seq.count(), [&](index_t n, int) {
    m.position[n] = in.past(n);
    m.count[n] = (in.past(n) + s.seq.length(n)) / B;
  });
  parallel_for(dev, s.seq.count() * m.k_nlhk.extent[1], [&](index_t unit, int) {
    index_t const n = unit / m.k_nlhk.extent[1], c = unit % m.k_nlhk.extent[1];
    if (c >= m.count[n]) return;
    auto const average = [&](view4<T const> const& before, view3<T const> const& rows, view4<T> const& to) {
      for (index_t h = 0; h < to.extent[2]; ++h) {
        T* const mean = to.at(n, c, h);
        std::fill_n(mean, to.extent[3], T(0));
        for (index_t j = c * B; j < (c + 1) * B; ++j) {
          T const* const x = token_at(s, n, in.past(n), before, rows, j, h);
          for (index_t i = 0; i < to.extent[3]; ++i) mean[i] += x[i];
        }
        for (index_t i = 0; i < to.extent[3]; ++i) mean[i] /= T(B);
      }
    };
    average(in.past_k_nlhk, in.k_rhk, m.k_nlhk);
    average(in.past_v_nlhv, in.v_rhv, m.v_nlhv);
  });
  return m;
}

/// Each token of a complete chunk takes its share of the mean's derivative, the others nothing.
template <class Device, class T>
void spread_to_tokens(Device dev, attention_shape const& s, attention_input<T> const& in, chunk_means<T> const& of,
                      attention_gradient<T> const& d_mean, attention_gradient<T> const& d) {
  index_t const B = s.select.chunk;
  parallel_for(dev, s.seq.count(), [&](index_t n, int) {
    auto const spread = [&](view4<T> const& mean, view4<T> const& before, view3<T> const& rows) {
      for (index_t j = before ? 0 : in.past(n); j < in.past(n) + s.seq.length(n); ++j)
        for (index_t h = 0; h < mean.extent[2]; ++h) {
          T* const to = token_at(s, n, in.past(n), before, rows, j, h);
          T const* const from = j / B < of.count[n] ? mean.at(n, j / B, h) : nullptr;
          for (index_t i = 0; i < mean.extent[3]; ++i) to[i] = from ? from[i] / T(B) : T(0);
        }
    };
    spread(d_mean.past_k_nlhk, d.past_k_nlhk, d.k_rhk);
    spread(d_mean.past_v_nlhv, d.past_v_nlhv, d.v_rhv);
  });
}

}  // namespace detail

/// o [R,H,V] = attention over the means of the chunks that are complete at each query, B = select.chunk; zero
/// before the first. Work: 2 K + 2 V flops a query and complete chunk. Deterministic: the same bits for any number
/// of threads. Errors: value_error, shape_error (see validate).
template <class Which, class How, class Isa, class Threads, class T>
void compressed_attention_forward(device::basic_cpu<Isa, Threads> dev, attention_shape const& s,
                                  attention_input<T> const& in, view3<same<T>> o_rhv,
                                  attention_saved<How, same<T>> const* saved, attention_record const& record,
                                  arena& ws) {
  static_assert(Which::spec.compressed, "seqmix attention: this selector reads tokens; take attention_forward");
  validate(s, Which::spec);
  validate_input(s, in);
  arena_scope const scope(ws);
  auto const means = detail::average_chunks(dev, s, in, ws);
  attention_forward<Which, How>(dev, s, means.read_by(in), o_rhv, saved, record, ws);
}

/// The derivatives of compressed_attention_forward; the means are formed once more.
template <class Which, class How, class Isa, class Threads, class T>
void compressed_attention_backward(device::basic_cpu<Isa, Threads> dev, attention_shape const& s,
                                   attention_input<T> const& in, view3<same<T> const> o_rhv,
                                   attention_saved<How, same<T>> const& saved, view3<same<T> const> d_o_rhv,
                                   attention_gradient<same<T>> const& d, arena& ws) {
  static_assert(Which::spec.compressed, "seqmix attention: this selector reads tokens; take attention_backward");
  validate(s, Which::spec);
  validate_input(s, in);
  if (!dev.dry) validate_gradient<T>(s, d);
  arena_scope const scope(ws);
  auto const means = detail::average_chunks(dev, s, in, ws);
  attention_gradient<T> d_mean;
  d_mean.q_rhk = d.q_rhk;
  d_mean.past_k_nlhk = ws.take_view<T, 4>(means.k_nlhk.extent);
  d_mean.past_v_nlhv = ws.take_view<T, 4>(means.v_nlhv.extent);
  d_mean.sink_h = d.sink_h;
  attention_backward<Which, How>(dev, s, means.read_by(in), o_rhv, saved, d_o_rhv, d_mean, ws);
  detail::spread_to_tokens<decltype(dev), T>(dev, s, in, means, d_mean, d);
}

}  // namespace seqmix::inline v0::kernels
