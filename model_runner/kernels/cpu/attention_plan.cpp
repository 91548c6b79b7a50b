// Plans attention: divides the work of a step into items. Reads the slot table, but no keys.
//
//   prompts         blocks of tokens, for each KV head
//   decodes         pieces of 128 keys, all heads. Several pieces keep all threads busy with one long request
//   shared prefix   keys that decodes have in common: requests with equal beginnings get the same pages from the prefix
//                   cache
//
// A decode has one token, or one token and drafts to verify. The bits of these tokens are those of as many separate
// decodes, one after the other, in the same batch: they use the pieces of a single decode, and the shared prefixes of
// the first token.
//
// In fixed order, decodes are planned as prompts of one token. The bits of a token then depend only on the tokens
// before it: not on other requests that share them, and not on where its prompt was cut, cached, or recomputed after a
// retraction.
//
// Without causal attention (encoders) a whole text is computed at once, also one of a single token, like a prompt. The
// tokens of an image may see all of it (`sees_to`); a window begins by their own positions.
//
// Prompts that follow the same prefix keep their own items, and so their bits; their common blocks are packed only
// once.

#include "attention_plan.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "attention_sharing.h"
#include "parallel.h"
#include "program.h"

namespace engine {
namespace {

constexpr float LOG2_E = 1.44269504f;
constexpr int64_t PIECE = 128;         // keys of one item of a decode: 100 KB for 3 heads of 64, some 4 us for one core
constexpr int64_t TOGETHER = 16;       // tokens of a decode per item: their state stays in L2
constexpr int64_t SHARED_PIECE = 512;  // keys per item of a shared prefix; each item adds a partial result per request
constexpr int64_t TILE_HEADS = 288;    // query heads of an item's tokens: their values, 74 KB for D = 64, stay in L2
constexpr int64_t MOST_PACKED = 64 << 20;  // bytes; each item packs later blocks itself, which adds a tenth to its work

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

class Plan {
  public:
    Step step = {};  // first member: the address of a plan is that of its step

    Plan(const int32_t* table, int64_t width, int64_t page_size, int64_t num_kv_heads, int64_t group, int64_t head_dim,
         int64_t window, bool chunked, bool causal, bool fixed_order, float score_scale, float score_cap)
        : width_(width),
          page_size_(page_size),
          window_(window),
          chunked_(chunked),
          causal_(causal),
          fixed_order_(fixed_order) {
        step.slots = table;
        step.num_kv_heads = num_kv_heads;
        step.group = group;
        step.head_dim = head_dim;
        step.score_scale = score_scale * LOG2_E;
        step.score_cap = score_cap * LOG2_E;
    }

    void begin() {
        for (auto* numbers : {&tokens_, &partials_, &seen_from_, &seen_to_, &merges_, &next_partial_}) numbers->clear();
        items_.clear();
        blocks_.clear();
        decodes_.clear();
        extends_.clear();
        num_partials_ = 0;
    }

    // Adds the next request of the batch. sees_to: see `plan_attention`.
    void add(int64_t row, int64_t prefix_len, int64_t extend_len, bool decodes, const int64_t* sees_to) {
        int64_t first = int64_t(seen_to_.size());
        int64_t ahead = causal_ ? 0 : window_ ? window_ / 2 : extend_len;  // keys after its own that a token sees
        for (int64_t n = 0; n < extend_len; ++n) {
            int64_t to = prefix_len + n + 1 + ahead;
            seen_from_.push_back(first_seen(to));
            if (sees_to != nullptr) to = std::max(to, sees_to[first + n]);
            seen_to_.push_back(std::min(to, prefix_len + extend_len));
            tokens_.push_back(first + n);
            partials_.push_back(-1);
        }
        if (decodes && extend_len > 0 && causal_ && !fixed_order_)
            decodes_.push_back({row, first, first + extend_len, prefix_len, 0, 0});
        else
            extends_.push_back({row * width_, first, first + extend_len, prefix_len / page_size_, {}});
    }

    void finish() {
        // Tile entries so far are the tokens of the batch themselves. Entries with partial results follow.
        pack_extends();
        for (const Extend& extend : extends_) add_extend(extend);
        add_decodes();
        step.items = items_.data();
        step.tokens = tokens_.data();
        step.partials = partials_.data();
        step.seen_from = seen_from_.data();
        step.seen_to = seen_to_.data();
        step.merges = merges_.data();
        step.num_tiles = std::count_if(items_.begin(), items_.end(), [](const Item& item) { return item.is_tile; });
        step.num_items = int64_t(items_.size());
        step.blocks = blocks_.data();
        step.num_blocks = int64_t(blocks_.size());
        step.packed = packed_.get(step.num_blocks * block_bytes());
        step.num_merges = int64_t(merges_.size()) / 3;
        int64_t floats = num_partials_ * step.num_heads() * step.result_size();
        step.results = reinterpret_cast<float*>(results_.get(sizeof(float) * floats));
    }

  private:
    // The packed blocks that an item can use; by default none.
    struct Packed {
        int64_t to = 0, at = 0;
    };

    // New tokens of a request that belong to its prompt: [first, last) of the batch.
    struct Extend {
        int64_t table, first, last;
        int64_t num_pages; // whole pages before its first token
        Packed packed;
    };

    struct Decode {
        int64_t row, first, last; // its tokens are [first, last) of the batch
        int64_t prefix_len;
        int64_t own_from;         // the first key that it does not share
        int64_t num_shared;       // partial results from shared prefixes
    };

    // The first key that a token sees, of those before `to`.
    int64_t first_seen(int64_t to) const {
        if (window_ == 0) return 0;
        return chunked_ ? (to - 1) / window_ * window_ : std::max<int64_t>(to - window_, 0);
    }

    int64_t block() const { return std::max<int64_t>(1, TILE_HEADS / step.group); }  // tokens of a tile item

    // For all KV heads, in float, the largest type. Memory that is not written costs nothing.
    int64_t block_bytes() const {
        int64_t padded_dim = divide_up(step.head_dim, 32) * 32;
        return step.num_kv_heads * TILE_KEYS * int64_t(sizeof(float)) * (padded_dim + step.head_dim + 3);
    }

    // Packs the beginning of a range of positions, up to the memory limit.
    Packed pack(int64_t table, int64_t start, int64_t stop) {
        int64_t first = start / TILE_KEYS, num = int64_t(blocks_.size()), most = MOST_PACKED / block_bytes() - num;
        int64_t last = std::min(divide_up(stop, TILE_KEYS), first + std::max(most, int64_t(0)));
        for (int64_t block = first; block < last; ++block) {
            int64_t key = block * TILE_KEYS;
            blocks_.push_back({table + key, std::max(start - key, int64_t(0)), std::min(stop - key, TILE_KEYS)});
        }
        return {last * TILE_KEYS, num - first};
    }

    // Items of one KV head are adjacent: its packed blocks stay in L2 from item to item.
    template <class Items>
    void for_kv_heads(const Items& items) {
        for (int64_t head = 0; head < step.num_kv_heads; ++head) items(head);
    }

    // The last blocks of tokens see most keys; they come first.
    void add_extend(const Extend& extend) {
        for_kv_heads([&](int64_t head) {
            for (int64_t n = divide_up(extend.last - extend.first, block()); n-- > 0;) {
                int64_t first = extend.first + n * block(), last = std::min(first + block(), extend.last);
                items_.push_back({1, extend.table, seen_from_[first], seen_to_[last - 1], first, last, head,
                                  extend.packed.to, extend.packed.at});
            }
        });
    }

    // Packs what several items of one extend read, and the common beginnings of several extends. Extends are sorted by
    // their slots, so that those with the longest common prefix are adjacent.
    void pack_extends() {
        std::vector<Extend*> sorted;
        for (Extend& extend : extends_) sorted.push_back(&extend);
        if (window_ == 0 && sorted.size() > 1)
            std::stable_sort(sorted.begin(), sorted.end(), [&](const Extend* one, const Extend* other) {
                int64_t page = first_difference(*one, *other);
                if (page == other->num_pages) return false;
                return page == one->num_pages || slot_at(*one, page) < slot_at(*other, page);
            });
        for (size_t n = 0; n < sorted.size(); ++n) {
            Extend& mine = *sorted[n];
            int64_t before = n > 0 ? std::min(in_common(*sorted[n - 1], mine), sorted[n - 1]->packed.to) : 0;
            int64_t behind = n + 1 < sorted.size() ? in_common(mine, *sorted[n + 1]) : 0;
            if (mine.last - mine.first > block())
                mine.packed = pack(mine.table, seen_from_[mine.first], seen_to_[mine.last - 1]);
            else if (before > 0 && before >= behind)
                mine.packed = {before, sorted[n - 1]->packed.at};
            else if (behind > 0)
                mine.packed = pack(mine.table, 0, behind);
        }
    }

    int32_t slot_at(const Extend& extend, int64_t page) const { return step.slots[extend.table + page * page_size_]; }

    int64_t first_difference(const Extend& one, const Extend& other) const {
        int64_t pages = std::min(one.num_pages, other.num_pages), page = 0;
        while (page < pages && slot_at(one, page) == slot_at(other, page)) ++page;
        return page;
    }

    // Positions, in whole blocks, from the beginning on, that both have in the same slots.
    int64_t in_common(const Extend& one, const Extend& other) const {
        return window_ ? 0 : first_difference(one, other) * page_size_ / TILE_KEYS * TILE_KEYS;
    }

    // Adds the shared prefixes of the decodes, then the rest of each one's keys in pieces.
    //
    // A token's partial results are contiguous: those of its shared prefixes in order, then those of its own pieces.
    void add_decodes() {
        std::vector<SharedPrefix> shared;
        if (window_ == 0 && decodes_.size() > 1) shared = find_shared_prefixes();
        for (const SharedPrefix& prefix : shared)
            for (int64_t member : prefix.members) {
                decodes_[member].own_from = prefix.stop;
                decodes_[member].num_shared += divide_up(prefix.stop - prefix.start, SHARED_PIECE);
            }
        next_partial_.resize(seen_to_.size());
        for (const Decode& decode : decodes_)
            for (int64_t token = decode.first; token < decode.last; ++token) {
                int64_t num_pieces = divide_up(seen_to_[token], PIECE) - own_from(decode, token) / PIECE;
                next_partial_[token] = num_partials_;
                num_partials_ += decode.num_shared + num_pieces;
                for (int64_t number : {token, next_partial_[token], decode.num_shared + num_pieces})
                    merges_.push_back(number);
            }
        for (const SharedPrefix& prefix : shared) add_shared(prefix);
        for (const Decode& decode : decodes_) add_pieces(decode);
    }

    std::vector<SharedPrefix> find_shared_prefixes() const {
        std::vector<PrefixFinder::Request> requests;
        for (const Decode& decode : decodes_) requests.push_back({decode.row, decode.prefix_len / page_size_});
        return PrefixFinder(step.slots, width_, page_size_, std::move(requests)).find();
    }

    int64_t own_from(const Decode& decode, int64_t token) const { return std::max(decode.own_from, seen_from_[token]); }

    void add_shared(const SharedPrefix& prefix) {
        int64_t table = decodes_[prefix.members[0]].row * width_;
        for (int64_t start = prefix.start; start < prefix.stop; start += SHARED_PIECE) {
            int64_t entry = int64_t(tokens_.size());
            for (int64_t member : prefix.members)
                for (int64_t token = decodes_[member].first; token < decodes_[member].last; ++token) add_entry(token);
            int64_t end = int64_t(tokens_.size()), stop = std::min(start + SHARED_PIECE, prefix.stop);
            Packed packed;
            if (end - entry > block()) packed = pack(table, start, stop);
            for_kv_heads([&](int64_t head) {
                for (int64_t first = entry; first < end; first += block())
                    items_.push_back({1, table, start, stop, first, std::min(first + block(), end), head, packed.to,
                                      packed.at});
            });
        }
    }

    // Tokens share an item of a piece if they see the same first key of it: blocks of keys begin there.
    void add_pieces(const Decode& decode) {
        int64_t len = seen_to_[decode.last - 1];
        for (int64_t piece = own_from(decode, decode.first) / PIECE * PIECE; piece < len; piece += PIECE) {
            auto start_of = [&](int64_t token) { return std::max(piece, own_from(decode, token)); };
            auto sees = [&](int64_t token) { return seen_to_[token] > piece && start_of(token) < piece + PIECE; };
            for (int64_t token = decode.first, next; token < decode.last; token = next) {
                next = token + 1;
                if (!sees(token)) continue;
                int64_t end = std::min(decode.last, token + TOGETHER);
                while (next < end && start_of(next) == start_of(token)) ++next;
                int64_t entry = int64_t(tokens_.size());
                for (int64_t member = token; member < next; ++member) add_entry(member);
                items_.push_back({0, decode.row * width_, start_of(token), std::min(piece + PIECE, seen_to_[next - 1]),
                                  entry, entry + next - token, 0, 0, 0});
            }
        }
    }

    void add_entry(int64_t token) {
        tokens_.push_back(token);
        partials_.push_back(next_partial_[token]++);
    }

    int64_t width_, page_size_, window_;
    bool chunked_, causal_, fixed_order_;
    std::vector<Item> items_;
    std::vector<PackedBlock> blocks_;
    std::vector<int64_t> tokens_, partials_, seen_from_, seen_to_, merges_;
    std::vector<int64_t> next_partial_;  // per token of the batch
    std::vector<Extend> extends_;
    std::vector<Decode> decodes_;
    int64_t num_partials_ = 0;
    Scratch results_, packed_;
};

}  // namespace
}  // namespace engine

// Creates a plan for the layers of one window (0: none; or of chunks of that size, if `chunked`) over a slot table of `width` positions per row; it begins with
// a `Step`. causal: a token sees keys up to its own; else all keys of its request, or an odd window around its own.
// fixed_order: see the top of this file; decodes take longer. score_scale, score_cap (0: none): see `AttentionForm`.
EXPORT void* new_attention_plan(const int32_t* table, int64_t width, int64_t page_size, int64_t num_kv_heads,
                                int64_t group, int64_t head_dim, int64_t window, int chunked, int causal,
                                int fixed_order, float score_scale, float score_cap) {
    return new engine::Plan(table, width, page_size, num_kv_heads, group, head_dim, window, chunked, causal, fixed_order,
                            score_scale, score_cap);
}

EXPORT void free_attention_plan(void* plan) { delete static_cast<engine::Plan*>(plan); }

// Plans a step and replaces the previous one; requests without new tokens are skipped.
//
// decodes: for each request, whether it decodes: its new tokens are the last sampled one and drafts. Null: all decode.
// sees_to: for each token the end of the keys that it sees, never less than that of the token before it in a request;
// at least its own position is seen. Null: no other.
EXPORT void plan_attention(void* plan_, const int64_t* rows, const int64_t* prefix_lens, const int64_t* extend_lens,
                           const int64_t* decodes, const int64_t* sees_to, int64_t num_requests) {
    engine::parallel_for_dynamic(1, [&](int64_t) {  // on one thread of a team
        engine::Plan& plan = *static_cast<engine::Plan*>(plan_);
        plan.begin();
        for (int64_t n = 0; n < num_requests; ++n)
            plan.add(rows[n], prefix_lens[n], extend_lens[n], decodes == nullptr || decodes[n], sees_to);
        plan.finish();
    });
}

RECORDABLE(plan_attention)
