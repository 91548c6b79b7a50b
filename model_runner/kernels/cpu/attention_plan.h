// Data structures of an attention plan: `attention_plan.cpp` creates it, `attention.cpp` executes it.
//
// A step is a list of items, planned once for all layers of a window. There are two kinds:
//
//   stream   a piece of a request's keys with its token, or with several tokens if it verifies drafts; all heads. Keys
//            and values pass once through the registers. Most decode work is of this kind, limited by memory bandwidth.
//   tile     many tokens and keys that they have in common, one KV head. Blocks of 64 keys are packed for the matmuls;
//            all query heads of all tokens are their rows. Used for prompts, and for prefixes that several requests of
//            a batch share: these are read once for all of them. Blocks that several items read are packed before all
//            items.
//
// The partial result of an item is the attention of its tokens to its keys alone: the maximum score, the sum of the
// weights, and the weighted values. The partial results of a token are merged at the end; a token with a single tile
// item needs no merge. The sink of a head joins the sum of the weights there, or when a single tile item writes its
// final result. Pieces begin at fixed positions and are merged in order, so the bits of a token do not depend on
// the batch. The exception is a shared prefix: the other requests determine which pieces are streams and which are
// tiles.

#pragma once

#include <cstdint>

namespace engine {

constexpr int64_t KEY_BLOCK = 64;  // keys per block of a stream item
constexpr int64_t TILE_KEYS = 64;  // keys per block of a tile item

struct Item {
    int64_t is_tile;
    int64_t table;       // index in the slot table of the request's first position
    int64_t start, stop; // keys: positions in the request; a token sees those before its `seen_to`
    int64_t first, last; // tokens: the entries [first, last) of `tokens`
    int64_t kv_head;     // tile items only
    int64_t packed_to;   // tile items: blocks before this position are packed; the item packs the others itself
    int64_t packed;      // tile items: number of the packed block of position 0, extrapolated if that is not packed
};

// Positions of a request that are packed once for several items.
struct PackedBlock {
    int64_t table;       // index in the slot table of the block's first position
    int64_t begin, end;  // positions of the block that any token sees
};

// Its address is fixed for the life of a plan; the arrays that it points to move when a larger step is planned.
struct Step {
    const int32_t* slots;     // the slot table
    const Item* items;
    const int64_t* tokens;    // entries of all items
    const int64_t* partials;  // per entry of `tokens`: index of its partial result; -1: final, written to the output
    const int64_t* seen_from; // per token of the batch: the first key that it sees, 0 without a window
    const int64_t* seen_to;   // per token: end of the keys that it sees, exclusive
    const PackedBlock* blocks;
    char* packed;             // memory for the packed blocks, all KV heads
    const int64_t* merges;    // per token with partial results: the token, its first partial result, how many
    float* results;           // per partial result and head: `result_size` floats
    int64_t num_tiles, num_items; // tile items come first
    int64_t num_merges, num_blocks;
    int64_t num_kv_heads, group, head_dim;
    float score_scale;        // of products of queries and keys; scores are base-2 exponents
    float score_cap;          // scores become cap * tanh(score / cap); 0: they are not capped

    int64_t num_heads() const { return num_kv_heads * group; }
    // Floats: the maximum score, the sum of the weights, padding to 16, then the weighted values, padded to whole
    // chunks of 32.
    int64_t result_size() const { return 16 + (head_dim + 31) / 32 * 32; }
};

}  // namespace engine
