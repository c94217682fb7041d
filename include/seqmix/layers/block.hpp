#pragma once

#include <algorithm>
#include <tuple>
#include <utility>

#include <seqmix/layers/layer_on.hpp>
#include <seqmix/layers/parameters.hpp>

namespace seqmix::inline v0 {

/// Layers one behind another that count as one: a mixing layer and its MLP make a Transformer block.
template <class... Layers>
class block {
  static_assert(sizeof...(Layers) > 0, "seqmix block: name at least one layer");
  static constexpr std::size_t count = sizeof...(Layers);
  using indices = std::index_sequence_for<Layers...>;
  template <class Device, class T>
  static constexpr bool runs_on = (layer_detail::has_forward_on<Layers, Device, T> && ...);
  template <class Device, class T>
  static constexpr bool trains_on = (layer_detail::has_backward_on<Layers, Device, T> && ...);

 public:
  using options = std::tuple<typename Layers::options...>;
  static std::string name() {
    std::string text;
    ((text += (text.empty() ? "block[" : "+") + Layers::name()), ...);
    return text + "]";
  }

  block(options const& o, index_t d_model, parameter_room room) : block(o, d_model, room, indices{}) {}

  template <class T>
  struct state {
    std::tuple<typename Layers::template state<T>...> part;
    void clear() {
      std::apply([](auto&... s) { (s.clear(), ...); }, part);
    }
  };
  template <class T, class Device>
  state<T> carve_state(arena& a, pass<Device, T> const& run) const {
    return std::apply([&](auto const&... l) { return state<T>{std::tuple{l.template carve_state<T>(a, run)...}}; },
                      layers_);
  }
  std::tuple<Layers...> const& parts() const noexcept { return layers_; }
  /// Channels of the stream that its layers write or read; 0: none does.
  index_t stream_width() const {
    index_t width = 0;
    auto const widen = [&](auto const& l) {
      if constexpr (requires { l.stream_width(); }) width = (std::max)(width, l.stream_width());
    };
    std::apply([&](auto const&... l) { (widen(l), ...); }, layers_);
    return width;
  }
  index_t state_elements(index_t sequences_count, index_t capacity) const {
    return std::apply([&](auto const&... l) { return (l.state_elements(sequences_count, capacity) + ...); },
                      layers_);
  }

  template <class T>
  struct saved {
    std::tuple<typename Layers::template saved<T>...> part;
    std::array<view2<T>, count> x_rd;  ///< input of each layer but the first
  };
  template <class T, class Device>
  saved<T> carve_saved(arena& a, pass<Device, T> const& run) const {
    saved<T> s{
        std::apply([&](auto const&... l) { return std::tuple{l.template carve_saved<T>(a, run)...}; }, layers_),
        {}};
    for (std::size_t i = 1; i < count; ++i) s.x_rd[i] = a.take_view<T, 2>({run.rows(), d_model_});
    return s;
  }

  template <class Device, class T>
  requires runs_on<Device, T>
  void forward(pass<Device, T> const& run, view2<same<T> const> x_rd, view2<same<T>> y_rd,
               saved<same<T>> const& keep, state<same<T>> const* before, state<same<T>>* after, arena& ws) const {
    each(indices{}, [&]<std::size_t I>(std::integral_constant<std::size_t, I>) {
      std::get<I>(layers_).forward(run, I == 0 ? x_rd : view2<T const>(keep.x_rd[I]),
                                   I + 1 == count ? y_rd : keep.x_rd[(I + 1) % count], std::get<I>(keep.part),
                                   before ? &std::get<I>(before->part) : nullptr,
                                   after ? &std::get<I>(after->part) : nullptr, ws);
    });
  }

  template <class Device, class T>
  requires trains_on<Device, T>
  void backward(pass<Device, T> const& run, view2<same<T> const> x_rd, saved<same<T>> const& keep,
                view2<same<T> const> dy_rd, view2<same<T>> dx_rd, state<same<T>> const* before,
                state<same<T>> const* d_after, state<same<T>>* d_before, same<T>* d_base, arena& ws) const {
    arena_scope const scope(ws);
    std::array<view2<T>, 2> between{ws.take_view<T, 2>({run.rows(), d_model_}),
                                    ws.take_view<T, 2>({run.rows(), d_model_})};
    view2<T const> d = dy_rd;
    each(indices{}, [&]<std::size_t J>(std::integral_constant<std::size_t, J>) {
      constexpr std::size_t I = count - 1 - J;
      view2<T> const to = I == 0 ? dx_rd : between[I % 2];
      std::get<I>(layers_).backward(run, I == 0 ? x_rd : view2<T const>(keep.x_rd[I]), std::get<I>(keep.part), d,
                                    to, before ? &std::get<I>(before->part) : nullptr,
                                    d_after ? &std::get<I>(d_after->part) : nullptr,
                                    d_before ? &std::get<I>(d_before->part) : nullptr, d_base, ws);
      d = to;
    });
  }

 private:
  template <std::size_t... I>
  block(options const& o, index_t d_model, parameter_room room, std::index_sequence<I...>)
      : d_model_(d_model), layers_{Layers(std::get<I>(o), d_model, room)...} {}
  template <std::size_t... I, class F>
  static void each(std::index_sequence<I...>, F const& f) {
    (f(std::integral_constant<std::size_t, I>{}), ...);
  }
  index_t d_model_;
  std::tuple<Layers...> layers_;
};

}  // namespace seqmix::inline v0
