// Where the elements of a tile lie in shared memory, whose rows of 32, 64 or 128 bytes are swizzled: in groups of rows,
// the 16-byte pieces of a row change places, so that one column's pieces lie in different banks. The copy engine, the
// matrix product and ordinary stores must agree. PTX ISA 9.0, "Tensors: Swizzling Modes", "Matrix Descriptor Format".
#pragma once

#include <cstdint>

namespace geglu::cuda::sm90 {

// The offset of piece `piece` of a row in a tile whose rows have kPieces pieces: 8 for 128 bytes, 4 for 64
// bytes, 2 for 32 bytes. The tile is aligned to 8 rows of 128 bytes.
template <int kPieces>
__device__ __forceinline__ uint32_t swizzled_offset(int row, int piece) {
  static_assert(kPieces == 2 || kPieces == 4 || kPieces == 8, "rows of 32, 64 or 128 bytes");
  const int group_row = row * kPieces / 8;  // the row of 128 bytes that it lies in
  return row * kPieces * 16 + (piece ^ group_row % kPieces) * 16;
}

// The descriptor of a matrix for wgmma, for rows of 128 bytes in the 128-byte swizzle: groups of 8 rows follow each
// other, 1024 bytes apart and aligned to 1024 bytes. The leading offset has no meaning in this layout. Advancing along
// a row by 32 bytes, the 16 elements of one product, adds kNextDepth.
constexpr uint64_t kNextDepth = 32 >> 4;

__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t shared_address) {
  constexpr uint64_t kGroupOffset = 1024 >> 4;
  constexpr uint64_t kSwizzle128 = 1;
  return (shared_address >> 4 & 0x3fff) | uint64_t{1} << 16 | kGroupOffset << 32 | kSwizzle128 << 62;
}

}  // namespace geglu::cuda::sm90
