#pragma once

#include <cstdint>
#include <memory>
#include <tuple>
#include <variant>
#include <vector>

#include <seqmix/layers/block.hpp>
#include <seqmix/layers/layer.hpp>
#include <seqmix/layers/norm.hpp>
#include <seqmix/layers/swiglu.hpp>

namespace seqmix::inline v0 {

/// Layer l of a model has type l mod n of the pattern's n types.
template <class... Layers>
struct pattern {
  static_assert(sizeof...(Layers) > 0, "seqmix pattern: name at least one layer type");
};

template <class Pattern>
class language_model;

/// Token embedding, layers, a last norm and logits over the vocabulary (tied to the embedding unless told
/// otherwise). The model holds sizes and the places of its tensors; the numbers are handed in as one buffer.
template <class... Layers>
class language_model<pattern<Layers...>> {
 public:
  struct options {
    index_t vocabulary = 256;
    index_t d_model = 128;
    index_t layers = 1;
    bool tied = true;
    double norm_eps = 1e-5;
    initialiser embedding = init::normal(0.02);
    std::tuple<typename Layers::options...> layer{};
  };

  static std::string name() {
    std::string text;
    ((text += (text.empty() ? "" : ",") + Layers::name()), ...);
    return text;
  }

  explicit language_model(options const& o) : o_(o) {
    if (o.vocabulary < 1 || o.d_model < 1 || o.layers < 0)
      throw option_error(
          "seqmix: language_model: vocabulary and d_model must be at least 1 and layers at least 0, got " +
          std::to_string(o.vocabulary) + ", " + std::to_string(o.d_model) + " and " + std::to_string(o.layers));
    parameter_room top(list_, "model", {0, o.layers});
    embedding_ = top.matrix("embedding", o.vocabulary, o.d_model, o.embedding);
    for (index_t l = 0; l < o.layers; ++l)
      add_layer(l, parameter_room(list_, "layers." + std::to_string(l), {l, o.layers}),
                std::index_sequence_for<Layers...>{});
    norm_ = norm<norm_kind::rms>(top.inner("norm"), o.d_model, o.norm_eps);
    head_ = o.tied ? embedding_ : top.matrix("head", o.vocabulary, o.d_model, o.embedding);
  }

  options const& settings() const noexcept { return o_; }
  parameter_list const& parameters() const noexcept { return list_; }
  /// Numbers outside the embedding and an untied head.
  index_t non_embedding_parameters() const noexcept {
    return list_.count() - o_.vocabulary * o_.d_model * (o_.tied ? 1 : 2);
  }

  template <class T>
  using layer_state = std::variant<typename Layers::template state<T>...>;
  template <class T>
  using layer_saved = std::variant<typename Layers::template saved<T>...>;

  /// What the model carries along time for N sequences of up to `capacity` tokens: one part a layer, and the
  /// position.
  template <class T>
  class state {
   public:
    index_t count() const noexcept { return index_t(position.size()); }
    index_t capacity() const noexcept { return capacity_; }
    /// Forgets everything: the next token is the first.
    void clear() {
      for (auto& l : layer) std::visit([](auto& s) { s.clear(); }, l);
      std::fill(position.begin(), position.end(), index_t(0));
    }
    /// Every number 0: what a derivative starts from. (A cleared state may hold others, such as a maximum of -inf.)
    void zero() { block_.fill(std::byte(0)); }
    std::vector<index_t> position;
    std::vector<layer_state<T>> layer;

   private:
    friend language_model;
    index_t capacity_ = 0;
    buffer<std::byte> block_;
  };
  template <class T>
  state<T> make_state(index_t sequences_count, index_t capacity) const {
    pass<device::reference, T> run{{}, nullptr, sequences::batch(sequences_count, 0)};
    run.capacity = capacity;
    state<T> s;
    s.capacity_ = capacity;
    s.position.assign(std::size_t(sequences_count), 0);
    auto plan = arena::measure();
    for (auto const& l : layers_) carve_layer_state(plan, run, l);
    s.block_ = buffer<std::byte>(plan.used());
    arena pieces(s.block_);
    for (auto const& l : layers_) s.layer.push_back(carve_layer_state(pieces, run, l));
    s.clear();
    return s;
  }
  /// Numbers a state holds; independent of how many tokens it has seen.
  index_t state_elements(index_t sequences_count, index_t capacity) const {
    index_t n = 0;
    for (auto const& l : layers_)
      n += std::visit([&](auto const& x) { return x.state_elements(sequences_count, capacity); }, l);
    return n;
  }

  struct memory_options {
    bool training = false;  ///< keeps what backward needs
    index_t capacity = 0;   ///< tokens of the states this run meets; 0: no states
  };

  /// All memory of a run over one shape, allocated once: saved activations, workspace, logits.
  template <class Device, class T>
  class memory {
   public:
    view2<T> logits_rv;  ///< after forward; backward reads the loss's derivative from here
    pass<Device, T> run;

   private:
    friend language_model;
    std::vector<layer_saved<T>> saved;
    std::vector<view2<T>> x_rd;  ///< input of every layer, output of the last
    norm<norm_kind::rms>::saved<T> final_norm;
    view2<T> normed_rd, dx_rd, dy_rd;
    std::unique_ptr<arena> ws;
    buffer<std::byte> saved_block, ws_block;
  };

  /// Plans and allocates for this division into sequences. A packed `seq` must outlive the memory.
  template <class T, class Device>
  memory<Device, T> make_memory(Device dev, sequences seq, memory_options m) const {
    memory<Device, T> mem;
    mem.run = {dev, nullptr, seq};
    mem.run.training = m.training;
    mem.run.capacity = m.capacity;
    auto plan = arena::measure();
    carve(plan, mem);
    mem.saved_block = buffer<std::byte>(plan.used());
    arena pieces(mem.saved_block);
    carve(pieces, mem);
    if constexpr (is_cpu<Device>) {
      mem.ws_block = buffer<std::byte>(measure_workspace(mem));
      mem.ws = std::make_unique<arena>(mem.ws_block);
    } else {
      mem.ws = std::make_unique<arena>(arena::growing());
    }
    return mem;
  }

  /// logits [R,vocabulary] of tokens [R]. With `carried` the tokens continue its sequences and it is advanced;
  /// `initial` (nullptr: none, or the same object) is where they start from.
  template <class Device, class T>
  void forward(memory<Device, T>& mem, T const* parameters, std::int32_t const* tokens,
               state<T> const* initial = nullptr, state<T>* carried = nullptr) const {
    check_tokens(mem, tokens);
    check_state(mem, initial);
    check_state(mem, carried);
    mem.run.parameters = parameters;
    mem.run.position = initial ? initial->position.data() : nullptr;
    forward_pass(mem, tokens, initial, carried);
    if (!carried) return;
    for (index_t n = 0; n < mem.run.seq.count(); ++n)
      carried->position[std::size_t(n)] = (initial ? initial->position[std::size_t(n)] : 0) + mem.run.seq.length(n);
  }

  /// f(index, layer, what it saved) for every layer of a run, to look inside.
  template <class Device, class T, class F>
  void for_each_layer(memory<Device, T> const& mem, F const& f) const {
    for (std::size_t l = 0; l < layers_.size(); ++l)
      by_type(layers_[l], [&]<std::size_t I>(auto const& x, std::integral_constant<std::size_t, I>) {
        f(index_t(l), x, std::get<I>(mem.saved[l]));
      });
  }

  /// Sum over the counted labels (label >= 0) of -log p, and their number; the logits become
  /// `scale` (softmax - onehot) when training.
  struct loss_sum {
    double loss = 0.0;
    index_t counted = 0;
  };
  template <class Device, class T>
  loss_sum loss(memory<Device, T>& mem, std::int32_t const* labels, double scale) const {
    for (index_t r = 0; r < mem.run.rows(); ++r)
      if (labels[r] >= o_.vocabulary)
        throw value_error("seqmix: loss: label " + std::to_string(labels[r]) + " in row " + std::to_string(r) +
                          " is outside the vocabulary of " + std::to_string(o_.vocabulary));
    loss_sum sum;
    sum.counted = kernels::cross_entropy(mem.run.device, view2<T const>(mem.logits_rv), labels, scale,
                                         mem.run.training ? mem.logits_rv : view2<T>{}, &sum.loss, *mem.ws);
    return sum;
  }

  /// Adds the parameters' derivatives to d_parameters (same layout), from d_logits in the memory. `d_final` is the
  /// derivative of the final state, `d_initial` takes that of the initial one; nullptr for none.
  template <class Device, class T>
  void backward(memory<Device, T>& mem, T const* parameters, std::int32_t const* tokens, T* d_parameters,
                state<T> const* initial = nullptr, state<T> const* d_final = nullptr,
                state<T>* d_initial = nullptr) const {
    mem.run.parameters = parameters;
    mem.run.position = initial ? initial->position.data() : nullptr;
    backward_pass(mem, tokens, d_parameters, initial, d_final, d_initial);
  }

 private:
  template <std::size_t... I>
  void add_layer(index_t l, parameter_room room, std::index_sequence<I...>) {
    auto const which_type = std::size_t(l) % sizeof...(Layers);
    ((I == which_type ? void(layers_.emplace_back(std::in_place_index<I>, std::get<I>(o_.layer), o_.d_model, room))
                      : void()),
     ...);
  }
  template <class T, class Device>
  layer_state<T> carve_layer_state(arena& a, pass<Device, T> const& run, std::variant<Layers...> const& l) const {
    layer_state<T> out;
    by_type(l, [&]<std::size_t I>(auto const& x, std::integral_constant<std::size_t, I>) {
      out.template emplace<I>(x.template carve_state<T>(a, run));
    });
    return out;
  }
  /// f(layer, index of its type in the pattern): types may repeat, so a variant's index says which it is.
  template <class F, std::size_t I = 0>
  static void by_type(std::variant<Layers...> const& l, F const& f) {
    if constexpr (I < sizeof...(Layers)) {
      if (l.index() == I)
        f(std::get<I>(l), std::integral_constant<std::size_t, I>{});
      else
        by_type<F, I + 1>(l, f);
    }
  }

  index_t stream_width() const {
    index_t width = 0;
    for (auto const& l : layers_)
      std::visit(
          [&](auto const& x) {
            if constexpr (requires { x.stream_width(); }) width = (std::max)(width, x.stream_width());
          },
          l);
    return width;
  }

  template <class Device, class T>
  void carve(arena& a, memory<Device, T>& mem) const {
    index_t const R = mem.run.rows(), D = o_.d_model, S = stream_width();
    if (S > 0) mem.run.stream_rc = a.take_view<T, 2>({R, S});
    if (S > 0 && mem.run.training) mem.run.d_stream_rc = a.take_view<T, 2>({R, S});
    mem.saved.clear();
    mem.x_rd.clear();
    mem.logits_rv = a.take_view<T, 2>({R, o_.vocabulary});
    mem.normed_rd = a.take_view<T, 2>({R, D});
    mem.final_norm = norm<norm_kind::rms>::saved<T>::carve(a, R);
    std::array<view2<T>, 2> swap{};
    for (index_t l = 0; l <= o_.layers; ++l) {
      if (mem.run.training || l < 2) swap[std::size_t(l % 2)] = a.take_view<T, 2>({R, D});
      mem.x_rd.push_back(swap[std::size_t(l % 2)]);
    }
    mem.dx_rd = mem.run.training ? a.take_view<T, 2>({R, D}) : view2<T>{};
    mem.dy_rd = mem.run.training ? a.take_view<T, 2>({R, D}) : view2<T>{};
    index_t const mark = a.used();
    index_t most = mark;
    for (auto const& l : layers_) {
      if (!mem.run.training) a.rewind(mark);  // without backward the layers share their room
      layer_saved<T> s;
      by_type(l, [&]<std::size_t I>(auto const& x, std::integral_constant<std::size_t, I>) {
        s.template emplace<I>(x.template carve_saved<T>(a, mem.run));
      });
      mem.saved.push_back(s);
      most = (std::max)(most, a.used());
    }
    a.rewind(most);
  }

  /// A dry run of forward and backward on a measuring arena.
  template <class Device, class T>
  index_t measure_workspace(memory<Device, T>& mem) const {
    mem.ws = std::make_unique<arena>(arena::measure());
    mem.run.device.dry = true;
    state<T> empty;
    bool const stateful = mem.run.capacity > 0;
    auto plan = arena::measure();
    if (stateful) {
      for (auto const& l : layers_) empty.layer.push_back(carve_layer_state(plan, mem.run, l));
      empty.position.assign(std::size_t(mem.run.seq.count()), 0);
      mem.run.position = empty.position.data();
    }
    auto* const s = stateful ? &empty : nullptr;
    forward_pass(mem, nullptr, s, s);
    if (mem.run.training) {
      kernels::cross_entropy(mem.run.device, view2<T const>(mem.logits_rv), nullptr, 1.0, mem.logits_rv, nullptr,
                             *mem.ws);
      backward_pass(mem, nullptr, static_cast<T*>(nullptr), s, s, s);
    } else {
      kernels::cross_entropy(mem.run.device, view2<T const>(mem.logits_rv), nullptr, 1.0, view2<T>{}, nullptr,
                             *mem.ws);
    }
    mem.run.position = nullptr;
    mem.run.device.dry = false;
    return mem.ws->peak();
  }

  template <class Device, class T>
  void forward_pass(memory<Device, T>& mem, std::int32_t const* tokens, state<T> const* initial,
                    state<T>* carried) const {
    auto const& run = mem.run;
    kernels::embedding_forward(run.device, tokens, view2<T const>(embedding_.of(run.parameters)), mem.x_rd[0]);
    for (std::size_t l = 0; l < layers_.size(); ++l)
      by_type(layers_[l], [&]<std::size_t I>(auto const& x, std::integral_constant<std::size_t, I>) {
        x.forward(run, mem.x_rd[l], mem.x_rd[l + 1], std::get<I>(mem.saved[l]),
                  initial ? &std::get<I>(initial->layer[l]) : nullptr,
                  carried ? &std::get<I>(carried->layer[l]) : nullptr, *mem.ws);
      });
    norm_.forward(run.device, run.parameters, mem.x_rd[layers_.size()], mem.normed_rd, mem.final_norm);
    kernels::linear_forward(run.device, view2<T const>(mem.normed_rd), head_.of(run.parameters), mem.logits_rv,
                            false, *mem.ws);
  }

  template <class Device, class T>
  void backward_pass(memory<Device, T>& mem, std::int32_t const* tokens, T* d_parameters, state<T> const* initial,
                     state<T> const* d_final, state<T>* d_initial) const {
    auto const& run = mem.run;
    if (!run.device.dry && run.d_stream_rc) std::fill_n(run.d_stream_rc.data, run.d_stream_rc.size(), T(0));
    view2<T const> const d_logits = mem.logits_rv;
    kernels::linear_backward_weight(run.device, d_logits, mem.normed_rd, head_.of(d_parameters), *mem.ws);
    kernels::linear_backward_input(run.device, d_logits, head_.of(run.parameters), mem.dx_rd, false, *mem.ws);
    norm_.backward(run.device, run.parameters, mem.x_rd[layers_.size()], mem.final_norm, mem.dx_rd, mem.dy_rd,
                   false, d_parameters, *mem.ws);
    for (std::size_t l = layers_.size(); l-- > 0;) {
      by_type(layers_[l], [&]<std::size_t I>(auto const& x, std::integral_constant<std::size_t, I>) {
        x.backward(run, mem.x_rd[l], std::get<I>(mem.saved[l]), mem.dy_rd, mem.dx_rd,
                   initial ? &std::get<I>(initial->layer[l]) : nullptr,
                   d_final ? &std::get<I>(d_final->layer[l]) : nullptr,
                   d_initial ? &std::get<I>(d_initial->layer[l]) : nullptr, d_parameters, *mem.ws);
      });
      std::swap(mem.dx_rd, mem.dy_rd);
    }
    kernels::embedding_backward(run.device, tokens, view2<T const>(mem.dy_rd), embedding_.of(d_parameters));
  }

  template <class Device, class T>
  void check_tokens(memory<Device, T> const& mem, std::int32_t const* tokens) const {
    for (index_t r = 0; r < mem.run.rows(); ++r)
      if (tokens[r] < 0 || tokens[r] >= o_.vocabulary)
        throw value_error("seqmix: forward: token " + std::to_string(tokens[r]) + " in row " + std::to_string(r) +
                          " is outside the vocabulary of " + std::to_string(o_.vocabulary));
  }
  template <class Device, class T>
  void check_state(memory<Device, T> const& mem, state<T> const* s) const {
    if (!s) return;
    if (s->count() != mem.run.seq.count())
      throw shape_error("seqmix: forward: the state holds " + std::to_string(s->count()) +
                        " sequences, the tokens are " + std::to_string(mem.run.seq.count()));
    if (s->capacity() != mem.run.capacity)
      throw shape_error("seqmix: forward: the state was made for " + std::to_string(s->capacity()) +
                        " tokens, the memory for " + std::to_string(mem.run.capacity));
  }

  options o_;
  parameter_list list_;
  std::vector<std::variant<Layers...>> layers_;
  weight embedding_, head_;
  norm<norm_kind::rms> norm_;
};

}  // namespace seqmix::inline v0
