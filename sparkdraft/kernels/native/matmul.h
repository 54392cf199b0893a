// A weight matrix as the matmuls read it, and y = x W^T in the two steps that matmul.cpp and experts.cpp share: each row
// is prepared by itself, then strips of outputs meet all prepared rows. What a strip is, is matmul.cpp's.
#pragma once

#include <cstdint>

#include "simd.h"

// What the codes of a matrix mean where they are not simply integers times a half, plus a half.
struct Levels {  // mirrored in packed.py
    const int8_t* table;     // 4 bits: what each of the 16 codes means
    int64_t scales;          // per group of 32: 1, or 2 for its halves
    int64_t scale_bytes;     // 2: halves; 4: floats
    int64_t offsets;         // 1: a float per group that is added to each of its weights; 0: none
    const float* row_scale;  // [strips * LANES], multiplies each output before its bias

    int64_t head() const { return scales * scale_bytes + 4 * offsets; }  // bytes per group and output
};

struct Matrix {  // mirrored in packed.py
    const uint8_t* data;
    int64_t width, out_features, bits;  // 4 and 8: integers in groups of 32, in strips; 32: floats [out_features, width]
    const float* bias;                  // [out_features], or null
    const Levels* levels;               // null: the integers of a GroupQuant, else the general form of matmul.cpp

    int64_t groups() const { return width / GROUP; }
    int64_t head_bytes() const { return groups() * LANES * (levels ? levels->head() : bits == 4 ? 4 : 2); }
    int64_t body_bytes() const { return groups() * LANES * (bits == 4 ? 16 : 32); }
    int64_t strip_bytes() const { return head_bytes() + body_bytes(); }
    int64_t strips() const { return (out_features + LANES - 1) / LANES; }
};

struct Output {
    float* y;
    int64_t stride;
    bool add;  // to what is there, else replace it
};

// Bytes of 'count' rows as the matrix wants them: integers, or a copy.
int64_t prepared_bytes(const Matrix& m, int64_t count);

// Row 'row' of 'count' rows, into its place among the prepared ones.
void prepare_row(const Matrix& m, const float* x, int64_t row, int64_t count, uint8_t* prepared);

// Strips 'begin' to 'end' times all rows, on the caller's thread. The bias is added to the sums.
void multiply(const Matrix& m, const uint8_t* prepared, int64_t count, Output out, int64_t begin, int64_t end);
