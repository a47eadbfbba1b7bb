#include "draft_chain.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace fastspec::cpu {
namespace {

[[noreturn]] void fail(const std::string& field, int64_t index, const std::string& expected,
                       int64_t actual) {
  throw std::invalid_argument(field + "[" + std::to_string(index) + "]: expected " + expected +
                              ", got " + std::to_string(actual));
}

template <class T>
void check_tokens(const std::string& field, const T* tokens, int64_t count, int64_t vocab_size) {
  for (int64_t i = 0; i < count; ++i) {
    if (tokens[i] >= 0 && tokens[i] < vocab_size) continue;
    fail(field, i, "a token from 0 to " + std::to_string(vocab_size - 1), tokens[i]);
  }
}

// The drafts of one call. The first pass reads the given rows, each later one a row of each
// sequence that still drafts.
class DraftChain {
 public:
  explicit DraftChain(DraftChainCall& call)
      : call_(call),
        pages_(call.layers[0].attention),
        factors_{call.layers[0].cos, call.layers[0].sin, call.layers[0].cos_stride,
                 call.layers[0].sin_stride},
        size_(call.layers[0].mlp.size),
        rotary_size_(call.layers[0].rotary_size),
        element_(pages_.element),
        tokens_(call.token_ids, call.token_ids + pages_.num_rows),
        cu_rows_(pages_.cu_rows, pages_.cu_rows + pages_.batch + 1),
        context_lens_(pages_.context_lens, pages_.context_lens + pages_.batch),
        table_(pages_.batch * pages_.max_blocks),
        logprobs_(pages_.batch),
        widened_(size_) {
    for (int32_t b = 0; b < pages_.batch; ++b) {
      std::copy_n(pages_.block_table + b * pages_.table_stride, pages_.max_blocks,
                  &table_[b * pages_.max_blocks]);
      drafting_.push_back(b);
      call.out_num_drawn[b] = call.num_tokens[b];
    }
    std::fill_n(call.out_token_ids, pages_.batch * call.num_steps, -1);
  }

  void run() {
    for (int64_t step = 0; !drafting_.empty(); ++step) {
      lay_out();
      read_tokens(step);
      decoder_layers(call_.layers);
      keep_hidden();
      draw(step);
      go_on(step);
    }
    clear_rest();
  }

 private:
  int64_t num_rows() const { return static_cast<int64_t>(tokens_.size()); }
  int64_t batch() const { return static_cast<int64_t>(drafting_.size()); }
  int64_t row_bytes() const { return size_ * size_of(element_); }

  // Slots and rotation factors of the pass's rows.
  void lay_out() {
    slots_.clear();
    cos_.resize(num_rows() * rotary_size_);
    sin_.resize(cos_.size());
    for (int64_t b = 0; b < batch(); ++b) {
      const int64_t count = cu_rows_[b + 1] - cu_rows_[b], first = context_lens_[b] - count;
      for (int64_t place = first; place < first + count; ++place) {
        const int64_t row = static_cast<int64_t>(slots_.size());
        const int32_t block = table_[b * pages_.max_blocks + place / pages_.block_size];
        slots_.push_back(block * pages_.block_size + place % pages_.block_size);
        if (rotary_size_ == 0) continue;
        std::copy_n(factors_.cos + place * factors_.cos_stride, rotary_size_,
                    &cos_[row * rotary_size_]);
        std::copy_n(factors_.sin + place * factors_.sin_stride, rotary_size_,
                    &sin_[row * rotary_size_]);
      }
    }
    for (DecoderLayerCall& layer : call_.layers) {
      AttentionCall& attention = layer.attention;
      attention.batch = batch();
      attention.num_rows = layer.store.num_tokens = num_rows();
      attention.table_stride = pages_.max_blocks;
      attention.block_table = table_.data();
      attention.context_lens = context_lens_.data();
      attention.cu_rows = cu_rows_.data();
      layer.store.slot_mapping = slots_.data();
      if (rotary_size_ == 0) continue;
      layer.cos = cos_.data();
      layer.sin = sin_.data();
      layer.cos_stride = layer.sin_stride = rotary_size_;
    }
  }

  // What the layers read: embeddings, or hidden states with normed embeddings in front.
  void read_tokens(int64_t step) {
    const bool reads_hidden = call_.embedding_norm != nullptr;
    std::vector<float>& embedded = reads_hidden ? embeddings_ : hidden_;
    if (reads_hidden && step == 0) {
      hidden_.resize(num_rows() * size_);
      kernels().layers.widen(call_.hidden, element_, num_rows() * size_, hidden_.data());
    }
    embedded.resize(num_rows() * size_);
    for (int64_t row = 0; row < num_rows(); ++row) {
      const char* from = static_cast<const char*>(call_.embedding) + tokens_[row] * row_bytes();
      float* to = &embedded[row * size_];
      kernels().layers.widen(from, element_, size_, to);
      if (!reads_hidden) continue;
      norm_row(call_.embedding_norm, to, to);
      round_row(to);
    }
    for (DecoderLayerCall& layer : call_.layers) {
      layer.hidden = hidden_.data();
      layer.embeddings = reads_hidden ? embeddings_.data() : nullptr;
    }
  }

  // Rounds the layers' output to the model's type, and keeps it where later passes look for it.
  void keep_hidden() {
    for (int64_t row = 0; row < num_rows(); ++row) {
      round_row(&hidden_[row * size_]);
      if (call_.hidden_cache == nullptr) continue;
      char* to = static_cast<char*>(call_.hidden_cache) + slots_[row] * row_bytes();
      kernels().layers.narrow(&hidden_[row * size_], size_, element_, to);
    }
  }

  // Draws a token after the last row of each sequence.
  void draw(int64_t step) {
    const OutputHead& head = call_.head;
    const int64_t logits_bytes = head.num_columns * size_of(element_);
    normed_.resize(batch() * row_bytes());
    logits_.resize(batch() * logits_bytes);
    for (int64_t b = 0; b < batch(); ++b) {
      norm_row(call_.norm, &hidden_[(cu_rows_[b + 1] - 1) * size_], widened_.data());
      kernels().layers.narrow(widened_.data(), size_, element_, &normed_[b * row_bytes()]);
    }
    linear({normed_.data(), head.projection.weight, head.projection.bias, logits_.data(), batch(),
            head.num_columns, size_, element_, head.element});
    picked_.resize(batch());
    picked_logprobs_.resize(batch());
    const LogitsMatrix logits = {
        {logits_.data(), head.num_columns, element_}, batch(), head.num_columns};
    sample(logits, parameters(), uniforms(step), 1, picked_.data(), picked_logprobs_.data());
    if (call_.out_logits == nullptr) return;
    for (int64_t b = 0; b < batch(); ++b) {
      const int64_t place = drafting_[b] * call_.num_steps + step;
      std::memcpy(static_cast<char*>(call_.out_logits) + place * logits_bytes,
                  &logits_[b * logits_bytes], logits_bytes);
    }
  }

  // Records the drawn tokens, and leaves the sequences that go on, with these tokens to read.
  void go_on(int64_t step) {
    int64_t kept = 0;
    for (int64_t b = 0; b < batch(); ++b) {
      const int32_t sequence = drafting_[b];
      int32_t token = picked_[b];
      if (token >= 0 && call_.head.tokens != nullptr) {
        token = call_.head.tokens[token];
        check_tokens("head_tokens", &token, 1, call_.vocab_size);  // may share memory with a cache
      }
      call_.out_token_ids[sequence * call_.num_steps + step] = token;
      logprobs_[sequence] += picked_logprobs_[b];
      int32_t& count = call_.out_num_drawn[sequence];
      const bool is_sure = !call_.has_threshold || logprobs_[sequence] >= call_.least_logprob;
      if (!is_sure) count = static_cast<int32_t>(step + 1);
      if (count <= step + 1) continue;
      const float* state = &hidden_[(cu_rows_[b + 1] - 1) * size_];
      std::copy_n(state, size_, &hidden_[kept * size_]);  // kept <= b <= that row
      std::copy_n(&table_[b * pages_.max_blocks], pages_.max_blocks,
                  &table_[kept * pages_.max_blocks]);
      context_lens_[kept] = context_lens_[b] + 1;
      drafting_[kept] = sequence;
      tokens_[kept++] = std::max(token, 0);
    }
    drafting_.resize(kept);
    tokens_.resize(kept);
    hidden_.resize(kept * size_);
    for (int64_t b = 0; b <= kept; ++b) cu_rows_[b] = static_cast<int32_t>(b);
  }

  // Logits after the ends of drafts.
  void clear_rest() {
    if (call_.out_logits == nullptr) return;
    const int64_t bytes = call_.head.num_columns * size_of(element_);
    for (int64_t b = 0; b < pages_.batch; ++b) {
      const int64_t end = (b + 1) * call_.num_steps,
                    left = call_.num_steps - call_.out_num_drawn[b];
      std::memset(static_cast<char*>(call_.out_logits) + (end - left) * bytes, 0, left * bytes);
    }
  }

  // The values of the sequences that still draft.
  template <class T>
  const T* chosen(const T* values, std::vector<T>& to) const {
    if (values == nullptr) return nullptr;
    to.clear();
    for (const int32_t sequence : drafting_) to.push_back(values[sequence]);
    return to.data();
  }

  SamplingParameters parameters() {
    const SamplingParameters& all = call_.parameters;
    return {chosen(all.temperature, temperature_), chosen(all.top_k, top_k_),
            chosen(all.top_p, top_p_), chosen(all.min_p, min_p_)};
  }

  const float* uniforms(int64_t step) {
    uniforms_.clear();
    for (const int32_t sequence : drafting_) {
      uniforms_.push_back(call_.uniform_samples[sequence * call_.num_steps + step]);
    }
    return uniforms_.data();
  }

  void norm_row(const void* weight, const float* from, float* to) const {
    Norm norm = call_.layers[0].norm;
    norm.weight = weight;
    kernels().layers.rms_norm(from, norm, size_, to);
  }

  void round_row(float* row) {
    rounded_.resize(row_bytes());
    kernels().layers.narrow(row, size_, element_, rounded_.data());
    kernels().layers.widen(rounded_.data(), element_, size_, row);
  }

  DraftChainCall& call_;
  const AttentionCall pages_;  // of the first pass
  const struct {
    const float *cos, *sin;
    int64_t cos_stride, sin_stride;
  } factors_;  // of all positions
  const int64_t size_, rotary_size_;
  const Element element_;
  // The inputs and results of the current pass, in the order of the sequences that draft.
  std::vector<int64_t> tokens_, slots_;
  std::vector<int32_t> drafting_, cu_rows_, context_lens_, table_, picked_, top_k_;
  std::vector<float> hidden_, embeddings_, cos_, sin_, picked_logprobs_;
  std::vector<float> temperature_, top_p_, min_p_, uniforms_;
  std::vector<char> normed_, logits_, rounded_;
  std::vector<float> logprobs_;  // of each sequence's draft
  std::vector<float> widened_;
};

void check(const DraftChainCall& call) {
  const AttentionCall& pages = call.layers[0].attention;
  check_indices(pages);
  check_tokens("token_ids", call.token_ids, pages.num_rows, call.vocab_size);
  if (call.head.tokens != nullptr) {
    check_tokens("head_tokens", call.head.tokens, call.head.num_columns, call.vocab_size);
  }
  std::vector<int32_t> cu_rows = {0}, last_lens;
  int64_t longest = 0;
  for (int64_t b = 0; b < pages.batch; ++b) {
    if (pages.cu_rows[b + 1] == pages.cu_rows[b])
      fail("cu_rows", b + 1, "a row of each sequence", 0);
    const int64_t num = call.num_tokens[b], most = call.num_steps;
    if (num < 1 || num > most) fail("num_tokens", b, "from 1 to " + std::to_string(most), num);
    const int64_t last = pages.context_lens[b] + num - 1;
    longest = std::max(longest, last);
    if (last > INT32_MAX) fail("num_tokens", b, "room for as many positions", num);
    last_lens.push_back(static_cast<int32_t>(last));
    cu_rows.push_back(static_cast<int32_t>(b + 1));
  }
  if (pages.cu_rows[0] != 0 || pages.cu_rows[pages.batch] != pages.num_rows) {
    fail("cu_rows", pages.batch, "all rows", pages.cu_rows[pages.batch]);
  }
  if (call.layers[0].rotary_size > 0 && longest > call.num_positions) {
    throw std::invalid_argument("cos: expected factors for " + std::to_string(longest) +
                                " positions, got " + std::to_string(call.num_positions));
  }
  AttentionCall last = pages;
  last.num_rows = pages.batch;
  last.context_lens = last_lens.data();
  last.cu_rows = cu_rows.data();
  for (const DecoderLayerCall& layer : call.layers) {
    last.num_blocks = layer.attention.num_blocks;
    last.block_size = layer.attention.block_size;
    check_indices(last);
  }
}

}  // namespace

void draft_chain(DraftChainCall call) {
  check(call);
  if (call.layers[0].attention.batch == 0) return;
  DraftChain(call).run();
}

}  // namespace fastspec::cpu
