// Parts of the matmuls of linear.cpp, compressed.cpp and blocks.cpp, for callers that divide the work of several
// matmuls at once (experts.cpp): all tokens of a call times the vectors [begin, end) of its outputs, on the calling
// thread. `begin` is a multiple of PART_VECTORS; the bits are those of the whole matmul.

#pragma once

#include <algorithm>

#include "block_tokens.h"
#include "blocks.h"
#include "linear.h"

namespace engine {

constexpr int64_t PART_VECTORS = 4;  // whole panels for every kind of weight

void multiply_part(const LinearCall& call, int64_t begin, int64_t end);

void multiply_compressed_part(const LinearCall& call, int64_t begin, int64_t end);

// `tokens`: those of the call, quantized; not read if `part_takes_tiles`.
void multiply_blocks_part(const BlockCall& call, const Quantized& tokens, int64_t begin, int64_t end, int64_t tiles_from);

// The matmul of a weight in superblocks and its part, for blocks.cpp alone (super_matmul.cpp).
void multiply_superblocks(const BlockCall& call, void* workspace);
void multiply_superblocks_part(const BlockCall& call, const Quantized& tokens, int64_t begin, int64_t end);

// Whether tokens are multiplied without quantization (block_tiles.h).
inline bool part_takes_tiles(int64_t num_tokens, int64_t tiles_from) { return TILES && num_tokens >= tiles_from; }

// body(first, last) for blocks of tokens, of about equally many row tiles each and at most `most`: their x stays in L2
// for all vectors of the part.
template <class Body>
inline void for_token_blocks(int64_t num_tokens, int64_t row_tile, int64_t most, const Body& body) {
    int64_t row_tiles = (num_tokens + row_tile - 1) / row_tile, blocks = (row_tiles + most - 1) / most;
    for (int64_t block = 0; block < blocks; ++block)
        body(row_tiles * block / blocks * row_tile, std::min(row_tiles * (block + 1) / blocks * row_tile, num_tokens));
}

}  // namespace engine
