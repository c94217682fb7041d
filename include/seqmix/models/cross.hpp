#pragma once

#include <array>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>

#include <seqmix/gates/constant_form.hpp>
#include <seqmix/gates/without_decay.hpp>
#include <seqmix/mixers/mixer.hpp>
#include <seqmix/mixers/pairing.hpp>
#include <seqmix/tensor/error.hpp>

/// Ablation grids: the product of lists of policies as one list of mixers, without the cells that make no sense.
namespace seqmix::inline v0 {

/// Types in a row.
template <class... Types>
struct type_list {
  static constexpr std::size_t size = sizeof...(Types);
};

namespace cross_detail {

using gates::detail::name_text;

constexpr bool is_word_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}
/// Letters and digits of a name, with one '_' for whatever stands between them: constant_form<mamba2> becomes
/// constant_form_mamba2.
constexpr name_text add_word(name_text to, std::string_view name) {
  bool between = false;
  for (std::size_t i = 0; i < name.size(); ++i) {
    if (is_word_letter(name[i])) {
      if (between) to = to.add("_");
      between = false;
      to = to.add(name.substr(i, 1));
    } else if (to.size > 0) {
      between = true;
    }
  }
  return to;
}

/// What the name of a routed selector leaves out, wherever it differs from the usual choice.
constexpr name_text add_routing(name_text to, which_spec const& spec) {
  constexpr std::array<char const*, 4> scores{"_mean_key", "_mean_key_prefix", "_exact_mass", "_exact_max"};
  constexpr std::array<char const*, 3> gradients{"", "_chunk_straight_through", "_gated"};
  auto const usual = spec.own_competes ? chunk_score::mean_key_prefix : chunk_score::mean_key;
  if (!spec.by_compression && spec.score != usual) to = to.add(scores[std::size_t(spec.score)]);
  if (spec.by_compression && spec.forced == forced_chunks::none) to = to.add("_unforced");
  to = to.add(gradients[std::size_t(spec.gradient)]);
  return spec.probability == chunk_probability::score ? to.add("_by_score") : to;
}

}  // namespace cross_detail

/// The word for a policy in the name of a cell: letters, digits and '_'. Made of the policy's `name`; specialise it
/// for own policies whose `name` does not tell them apart.
template <class Policy>
struct cell_word {
  static constexpr auto text = [] {
    auto const word = cross_detail::add_word({}, Policy::name);
    if constexpr (which<Policy>)
      return Policy::spec.routed ? cross_detail::add_routing(word, Policy::spec) : word;
    else
      return word;
  }();
};
template <selectors::top1_output Output, selectors::top1_gradient Gradient>
struct cell_word<selectors::top1<Output, Gradient>> {
  static constexpr auto text = [] {
    constexpr std::array<char const*, 4> gradients{"", "_straight_through_output", "_selected_weight",
                                                   "_index_only"};
    return cross_detail::name_text{}
        .add("top1_element")
        .add(Output == selectors::top1_output::weighted ? "_weighted" : "")
        .add(gradients[std::size_t(Gradient)]);
  }();
};
// The chunk selectors go by the names of their aliases.
template <chunk_score Score, chunk_gradient Gradient, chunk_probability Probability>
struct cell_word<selectors::own_plus_top1<Score, Gradient, Probability>> {
  static constexpr auto text = cross_detail::add_routing(
      cross_detail::name_text{}.add("top1_chunk"), selectors::own_plus_top1<Score, Gradient, Probability>::spec);
};
template <chunk_score Score, chunk_gradient Gradient, chunk_probability Probability>
struct cell_word<selectors::own_plus_top_k<Score, Gradient, Probability>> {
  static constexpr auto text = cross_detail::add_routing(
      cross_detail::name_text{}.add("top_k_chunks"), selectors::own_plus_top_k<Score, Gradient, Probability>::spec);
};
/// A half that stands for the whole gives the word: softmax, window; else both do.
template <class Which, class How>
struct cell_word<select<Which, How>> {
  static constexpr auto text = [] {
    if constexpr (std::is_same_v<Which, selectors::all>)
      return cell_word<How>::text;
    else if constexpr (std::is_same_v<How, selectors::softmax>)
      return cell_word<Which>::text;
    else
      return cell_word<Which>::text.add("_").add(cell_word<How>::text.view());
  }();
};

namespace cross_detail {

template <class S>
using completed = select<typename mixer_detail::halves<S>::which_type, typename mixer_detail::halves<S>::how_type>;

template <class M>
struct cell;
template <class State, class Gate, class Selector>
struct cell<mixer<State, Gate, Selector>> {
  static constexpr auto text = cell_word<State>::text.add("-")
                                   .add(cell_word<Gate>::text.view())
                                   .add("-")
                                   .add(cell_word<Selector>::text.view());
};

/// Names the two policies in the compiler's message.
template <class First, class Second>
struct differ_in_name {
  static_assert(
      cell_word<First>::text.view() != cell_word<Second>::text.view(),
      "seqmix cross: two policies of one list have the same name, so two cells would have one; take one of "
      "them, or give them different names (cell_word)");
};
template <class... Policies>
struct all_differ;
template <>
struct all_differ<> {};
template <class First, class... Rest>
struct all_differ<First, Rest...> : all_differ<Rest...> {
  static_assert((sizeof(differ_in_name<First, Rest>) + ... + 1) > 0);
};

template <class... Types>
struct joined {
  using list = type_list<Types...>;
  template <class... More>
  joined<Types..., More...> operator+(joined<More...>) const;
};

template <class State, class Gate, class Selector>
using one_or_none =
    std::conditional_t<pairs_v<State, Gate, Selector>, joined<mixer<State, Gate, completed<Selector>>>, joined<>>;
template <class State, class Gate, class... Selectors>
using row = decltype((joined<>{} + ... + one_or_none<State, Gate, Selectors>{}));

template <class States, class Gates, class Selectors>
struct crossed;
template <class... States, class... Gates, class... Selectors>
struct crossed<type_list<States...>, type_list<Gates...>, type_list<Selectors...>> {
  static_assert((state<States> && ...), "seqmix cross: the first list must hold states");
  static_assert((gate<Gates> && ...), "seqmix cross: the second list must hold gates");
  static_assert((mixer_detail::is_selector<Selectors> && ...),
                "seqmix cross: the third list must hold selectors, or halves of them");
  static_assert(sizeof(all_differ<States...>) + sizeof(all_differ<Gates...>) +
                    sizeof(all_differ<completed<Selectors>...>) >
                0);
  template <class State>
  using of_state = decltype((joined<>{} + ... + row<State, Gates, Selectors...>{}));
  using type = typename decltype((joined<>{} + ... + of_state<States>{}))::list;
};

}  // namespace cross_detail

/// All mixers of states x gates x selectors (or halves of selectors) that make sense, the selectors varying
/// fastest. What makes none is left out: `misfit_of` says why.
template <class States, class Gates, class Selectors>
using cross = typename cross_detail::crossed<States, Gates, Selectors>::type;

/// A gate, its form that does not depend on the token, and the one that forgets nothing.
template <gate Gate>
using decay_ablation = type_list<Gate, gates::constant_form<Gate>, gates::without_decay<Gate>>;

/// The name of a mixer in a grid, state-gate-selector, fit for a file: "history-none-softmax". Different cells of
/// one `cross` have different names.
template <class Mixer>
inline constexpr std::string_view cell_name = cross_detail::cell<Mixer>::text.view();

template <class List>
inline constexpr std::array<std::string_view, List::size> cell_names{};
template <class... Mixers>
inline constexpr std::array<std::string_view, sizeof...(Mixers)> cell_names<type_list<Mixers...>>{
    cell_name<Mixers>...};

/// The place of the cell of that name; List::size if there is none.
template <class List>
constexpr std::size_t find_cell(std::string_view name) noexcept {
  std::size_t at = 0;
  while (at < List::size && cell_names<List>[at] != name) ++at;
  return at;
}

namespace cross_detail {
template <class List, std::size_t Place>
struct at;
template <class... Mixers, std::size_t Place>
struct at<type_list<Mixers...>, Place> {
  static_assert(Place < sizeof...(Mixers),
                "seqmix cross: the grid has no such cell; cell_names holds the names of those it has");
  using type = std::tuple_element_t<Place, std::tuple<Mixers...>>;
};
}  // namespace cross_detail

/// `cell_at<grid, find_cell<grid>("history-none-softmax")>`
template <class List, std::size_t Place>
using cell_at = typename cross_detail::at<List, Place>::type;

/// f.template operator()<Mixer>() for every cell in order.
template <class... Mixers, class F>
constexpr void for_each_cell(type_list<Mixers...>, F const& f) {
  (f.template operator()<Mixers>(), ...);
}

/// The same for the cell of that name alone. Throws option_error for a name that no cell has.
template <class... Mixers, class F>
void with_cell(type_list<Mixers...> grid, std::string_view name, F const& f) {
  bool found = false;
  for_each_cell(grid, [&]<class M>() {
    if (cell_name<M> != name) return;
    found = true;
    f.template operator()<M>();
  });
  if (found) return;
  std::string known;
  for (auto const& n : cell_names<type_list<Mixers...>>) known += (known.empty() ? "" : ", ") + std::string(n);
  throw option_error("seqmix cross: no cell is called '" + std::string(name) + "'; the grid has " + known);
}

}  // namespace seqmix::inline v0
