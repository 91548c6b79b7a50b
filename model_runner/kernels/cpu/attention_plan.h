// What attention of one step consists of; `attention_plan.cpp` makes it, `attention.cpp` carries it out.
//
// A step is a list of items, planned once for all layers of a window. There are two kinds:
//
//   stream   a piece of a request's keys, and its token, or several where it checks drafts; all heads: keys and values
//            pass once through the registers. What decoding mostly is, limited by the speed of memory.
//   tile     many tokens and keys that they have in common, one KV head: blocks of 64 keys are packed for the matrix
//            products, and all query heads of all tokens are their rows. Prompts, and prefixes that several requests of
//            a batch share: these are read once for all of them. What several items read is packed before all items.
//
// An item's result is the attention of its tokens to its keys alone: the largest score, the sum of the weights, and the
// weighted values. Results of one token are merged at the end; a token with a single tile item is finished by that.
// Pieces begin at fixed positions and are merged in order, so a token's bits do not depend on the batch, unless a
// prefix is shared: which pieces are streams and which are tiles then depends on who else is there.

#pragma once

#include <cstdint>

namespace engine {

constexpr int64_t KEY_BLOCK = 64;  // of a stream item
constexpr int64_t TILE_KEYS = 64;  // of a tile item's block

struct Item {
    int64_t is_tile;
    int64_t table;       // where the request's row of the slot table begins
    int64_t start, stop; // keys: positions in the request; a token sees those before its `seen_to`
    int64_t first, last; // tokens: the entries [first, last) of `tokens`
    int64_t kv_head;     // of a tile
    int64_t packed_to;   // of a tile: blocks that begin before this position are packed, the others it packs itself
    int64_t packed;      // where: the number of the block that begins at position 0, were it packed, too
};

// Positions of a request that are packed for several items.
struct PackedBlock {
    int64_t table;       // where the slot table has the block's first position
    int64_t begin, end;  // positions of the block that somebody sees
};

// Its address is fixed for the life of a plan; what it points to moves when a larger step is planned.
struct Step {
    const int32_t* slots;     // the slot table
    const Item* items;
    const int64_t* tokens;    // of all items
    const int64_t* partials;  // of each entry of `tokens`: where the result goes; -1: finished, to the output
    const int64_t* seen_from; // of each token of the batch: the first key that it sees, without its window 0
    const int64_t* seen_to;   // behind the last one
    const PackedBlock* blocks;
    char* packed;             // room for them, of all KV heads
    const int64_t* merges;    // of each token with partials: the token, its first partial, how many
    float* results;           // of each partial, of each head: `result_size` floats
    int64_t num_tiles, num_items; // the tiles come first
    int64_t num_merges, num_blocks;
    int64_t num_kv_heads, group, head_dim;

    int64_t num_heads() const { return num_kv_heads * group; }
    // Floats: the largest score, the sum of the weights, and behind room for a vector the weighted values, in whole
    // chunks of 32.
    int64_t result_size() const { return 16 + (head_dim + 31) / 32 * 32; }
};

}  // namespace engine
