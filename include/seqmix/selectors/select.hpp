#pragma once

#include <seqmix/selectors/all.hpp>
#include <seqmix/selectors/chunks.hpp>
#include <seqmix/selectors/compressed.hpp>
#include <seqmix/selectors/linear.hpp>
#include <seqmix/selectors/softmax.hpp>
#include <seqmix/selectors/top1.hpp>
#include <seqmix/selectors/window.hpp>

namespace seqmix::inline v0::selectors {

/// The hard choice of one key among all.
template <top1_output Output = top1_output::hard, top1_gradient Gradient = top1_gradient::straight_through>
using top1_element = select<all, top1<Output, Gradient>>;

/// The own chunk and the best earlier one under a softmax.
template <chunk_score Score = chunk_score::mean_key, chunk_gradient Gradient = chunk_gradient::index_constant>
using top1_chunk = select<own_plus_top1<Score, Gradient>, softmax>;

/// The own chunk and the best selection::top_k earlier ones under a softmax.
template <chunk_score Score = chunk_score::mean_key, chunk_gradient Gradient = chunk_gradient::index_constant>
using top_k_chunks = select<own_plus_top_k<Score, Gradient>, softmax>;

namespace detail {
template <class S>
struct completed;
template <selector S>
struct completed<S> {
  using type = S;
};
template <how H>
struct completed<H> {
  using type = select<all, H>;
};
template <which W>
struct completed<W> {
  using type = select<W, softmax>;
};
}  // namespace detail

/// A half stands for the whole with the usual other half: a `how` reads all keys, a `which` reads by softmax.
template <class S>
requires selector<S> || how<S> || which<S>
using as_selector = typename detail::completed<S>::type;

}  // namespace seqmix::inline v0::selectors
