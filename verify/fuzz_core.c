/*
 * Packed data that lie, through the C core alone, under the address and undefined-behaviour sanitizers: `make fuzz`.
 *
 * The corpus is honest weights (python -m verify.fuzz --corpus). Each case changes some bytes, sizes or lengths of one of
 * them, puts each array into an allocation of just its size, passes the border as ops.cpp guards it, and calls check; what
 * has no fault is unpacked, multiplied and packed again. What check has refused goes to the functions that look themselves.
 *
 * With -DLIBFUZZER, clang's libFuzzer chooses what to change: it keeps what has reached new code. Else main does, at random:
 *
 *     fuzz_core CORPUS_FOLDER SECONDS [SEED]
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../contrib/ec/ec.h"
#include "../csrc/bitmap/bitmap.h"
#include "../csrc/core/cpu.h"
#include "../csrc/core/knobs.h"
#include "../csrc/codecs/dense12/dense12.h"
#include "../csrc/codecs/dense8/dense8.h"
#include "../csrc/macko/macko.h"
#include "../csrc/planes12/planes12.h"
#include "../csrc/slide/slide.h"
#include "../csrc/codecs/sparse11/sparse11.h"
#include "../csrc/codecs/sparse8/sparse8.h"
#include "../csrc/codecs/tile/tile.h"

enum { MACKO, BITMAP, EC, TILE, DENSE12, SPARSE11, DENSE8, SPARSE8, SLIDE, PLANES12, KINDS };
enum { MAX_ARRAYS = 8, MOST = 1 << 20 };

/* What a corpus file begins with; the arrays follow in the order of the format's dataclass. */
typedef struct header {
    int64_t kind, dtype, rows, cols;
    int64_t extra;    /* delta_bits, tiles (ec), widest (tile, sparse11, sparse8), slab_units (dense12), n (slide) */
    int64_t table[2]; /* of dense12 and sparse11; of dense8, sparse8 and slide the kind of codes */
    int64_t num_arrays, bytes[MAX_ARRAYS];
} header;

typedef struct input {
    header h;
    uint8_t *arrays[MAX_ARRAYS];
} input;

static uint64_t state;

static void begin_random(uint64_t seed) {
    seed = (seed ^ seed >> 30) * 0xbf58476d1ce4e5b9u;
    seed = (seed ^ seed >> 27) * 0x94d049bb133111ebu;
    state = (seed ^ seed >> 31) | 1;
}

static uint64_t next_random(void) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}

static int64_t below(int64_t n) {
    return n > 0 ? (int64_t)(next_random() % (uint64_t)n) : 0;
}

/* Never NULL, and ends where it ends. */
static void *exactly(int64_t bytes) {
    void *p = malloc(bytes > 0 ? (size_t)bytes : 1);
    if (!p) abort();
    return p;
}

static int64_t size_of(int64_t dtype) {
    return dtype == MACKO_F32 ? 4 : 2;
}

static int64_t edge(int64_t near) {
    static const int64_t edges[] = {0,         1,        -1, 63, 64, 65, 128, 1024, 65535, 65536, 65537, INT32_MAX - 1,
                                    INT32_MAX, INT64_MAX};
    return below(2) ? (int64_t)((uint64_t)near + (uint64_t)below(3) - 1) : edges[below(sizeof edges / sizeof *edges)];
}

/* dense12: the parts of a list and its entries, which are a hundredth of a slab. Whether there is one. */
static int change_list(input *in) {
    if (in->h.kind != DENSE12 || in->h.extra < macko_dense12_units(0) || in->h.extra > MACKO_DENSE12_MOST_UNITS)
        return 0;
    const int64_t size = in->h.extra * MACKO_SLAB_UNIT, words = (size - MACKO_DENSE12_BOUNDS_AT) / 4;
    if (in->h.bytes[0] < size) return 0;
    uint8_t *at = in->arrays[0] + below(in->h.bytes[0] / size) * size + MACKO_DENSE12_BOUNDS_AT;
    at += 4 * below(below(2) ? MACKO_SLAB_TILE_SLICES : words);
    uint32_t word;
    if (!below(4)) { /* that of the one before it, once more */
        memcpy(at, at - 4, 4);
        return 1;
    }
    memcpy(&word, at, 4);
    word = below(2) ? word ^ (uint32_t)1 << below(32) : word + ((uint32_t)below(3) - 1) * (below(2) ? 1 : 0x10000);
    memcpy(at, &word, 4);
    return 1;
}

static void change(input *in) {
    if (below(2) && change_list(in)) return;
    const int64_t which = below(in->h.num_arrays), bytes = in->h.bytes[which];
    uint8_t *array = in->arrays[which];
    switch (below(12)) {
    case 0: in->h.rows = edge(in->h.rows); return;
    case 1: in->h.cols = edge(in->h.cols); return;
    case 2:
        if (in->h.kind >= DENSE8 && below(2))
            in->h.table[0] = edge(in->h.table[0]);
        else if (in->h.kind >= DENSE12 && in->h.kind < DENSE8 && below(2))
            in->h.table[below(2)] ^= (int64_t)1 << below(32);
        else
            in->h.extra = edge(in->h.extra);
        return;
    case 3: { /* shorter or longer, by whole elements mostly */
        static const int64_t steps[] = {1, 2, 4, 8, 16, 64, 128, 256};
        const int64_t step = steps[below(8)] * (below(2) ? 1 : -1), length = bytes + step < 0 ? 0 : bytes + step;
        uint8_t *other = exactly(length);
        memset(other, 0, (size_t)length);
        memcpy(other, array, (size_t)(length < bytes ? length : bytes));
        free(array);
        in->arrays[which] = other, in->h.bytes[which] = length;
        return;
    }
    case 4:
    case 5: { /* a 32-bit number, one off or an edge; most arrays hold such */
        if (bytes < 8) return;
        int32_t number;
        uint8_t *at = array + below(bytes / 4) * 4;
        memcpy(&number, at, 4);
        number = (int32_t)edge(number);
        memcpy(at, &number, 4);
        return;
    }
    case 6: { /* a 64-bit one: ec's sets */
        if (bytes < 8) return;
        int64_t number;
        uint8_t *at = array + below(bytes / 8) * 8;
        memcpy(&number, at, 8);
        number =
            below(4) ? (int64_t)((uint64_t)number + (uint64_t)below(3) - 1) : (int64_t)(next_random() >> below(64));
        memcpy(at, &number, 8);
        return;
    }
    default:
        for (int64_t n = 1 + below(4); bytes && n; n--) {
            uint8_t *at = array + below(bytes);
            if (below(2))
                *at ^= (uint8_t)(1 << below(8));
            else
                *at = below(2) ? 0xff : (uint8_t)next_random();
        }
    }
}

static int64_t accepted[KINDS], refused[KINDS];

static int small(int64_t rows, int64_t cols) {
    return rows <= MOST && cols <= MOST && rows * cols <= MOST;
}

static void must(int good, const char *what) {
    if (good) return;
    fprintf(stderr, "%s\n", what);
    abort();
}

/* Packs w anew in every way, under the sanitizers; the canonical one has to be what check wants. */
static void pack_again(const void *w, macko_dtype dtype, int64_t rows, int64_t cols) {
    const int bits = 2 << below(3);
    int64_t *counts = exactly(rows * 8), stored = 0;
    macko_pack_count_cpu(w, dtype, bits, cols, 0, rows, counts);
    int32_t *row_ptr = exactly((rows + 1) * 4);
    for (int64_t row = 0; row < rows; row++) row_ptr[row] = (int32_t)stored, stored += counts[row];
    row_ptr[rows] = (int32_t)stored;
    const int64_t capacity = (stored + MACKO_CHUNK - 1) / MACKO_CHUNK * MACKO_CHUNK;
    uint8_t *values = exactly(capacity * size_of(dtype)), *deltas = exactly(capacity * bits / 8);
    memset(values, 0, (size_t)(capacity * size_of(dtype)));
    memset(deltas, 0, (size_t)(capacity * bits / 8));
    macko_pack_write_cpu(w, dtype, bits, cols, 0, rows, row_ptr, values, deltas);
    const macko_matrix m = {values, deltas, row_ptr, rows, cols, capacity, dtype, bits};
    must(!macko_check_cpu(&m, 0, rows).kind && !macko_check_cpu(&m, rows, rows).kind,
         "macko: packed anew, and refused");
    free(counts), free(row_ptr), free(values), free(deltas);
}

static macko_fault try_macko(const input *in) {
    const int64_t capacity = in->h.bytes[0] / size_of(in->h.dtype), rows = in->h.bytes[2] / 4 - 1, bits = in->h.extra;
    const int64_t cols = in->h.cols;
    macko_fault fault = {-1, 0, 0, 0};
    if (in->h.bytes[0] % size_of(in->h.dtype) || in->h.bytes[2] % 4 || capacity % MACKO_CHUNK) return fault;
    if ((bits != 2 && bits != 4 && bits != 8) || in->h.bytes[1] * 8 != capacity * bits) return fault;
    if (rows < 0 || cols < 0 || cols > INT32_MAX) return fault;
    const macko_matrix m = {in->arrays[0], in->arrays[1], (const int32_t *)in->arrays[2], rows,
                            cols,          capacity,      (macko_dtype)in->h.dtype,       (int)bits};
    fault = macko_check_cpu(&m, 0, rows);
    if (!fault.kind) fault = macko_check_cpu(&m, rows, rows);
    if (!small(rows, cols)) return fault;
    const int64_t size = size_of(in->h.dtype);
    uint8_t *w = exactly(rows * cols * size), *x = exactly(cols * size), *y = exactly(rows * size);
    memset(x, 0x3c, (size_t)(cols * size));
    const macko_fault unpacking = macko_unpack_cpu(&m, 0, rows, w), spmv = macko_spmv_cpu(&m, x, NULL, 0, rows, y);
    must(!unpacking.kind == !spmv.kind && (fault.kind || !spmv.kind), "macko: check, unpack and spmv disagree");
    if (!unpacking.kind) pack_again(w, m.dtype, rows, cols);
    free(w), free(x), free(y);
    return fault;
}

static macko_fault try_bitmap(const input *in) {
    const int64_t size = size_of(in->h.dtype), capacity = in->h.bytes[0] / size, rows = in->h.bytes[2] / 4 - 1;
    const int64_t cols = in->h.cols;
    macko_fault fault = {-1, 0, 0, 0};
    if (in->h.bytes[0] % size || in->h.bytes[2] % 4 || capacity < MACKO_BITMAP_PAD) return fault;
    if (rows < 0 || cols < 0 || cols > INT32_MAX || in->h.bytes[1] != rows * macko_bitmap_words(cols) * 8) return fault;
    const macko_bitmap m = {in->arrays[0], in->arrays[1], (const int32_t *)in->arrays[2], rows,
                            cols,          capacity,      (macko_dtype)in->h.dtype};
    fault = macko_bitmap_check_cpu(&m, 0, rows);
    if (!fault.kind) fault = macko_bitmap_check_cpu(&m, rows, rows);
    if (!small(rows, cols)) return fault;
    const int64_t tokens = below(6);
    uint8_t *w = exactly(rows * cols * size), *x = exactly(tokens * cols * size), *y = exactly(tokens * rows * size);
    memset(x, 0x3c, (size_t)(tokens * cols * size));
    const macko_fault expanding = macko_bitmap_expand_cpu(&m, 0, rows, w);
    const macko_fault spmv = macko_bitmap_spmv_cpu(&m, x, tokens, NULL, 0, rows, y);
    must(fault.kind || (!expanding.kind && !spmv.kind), "bitmap: check, expand and spmv disagree");
    if (!expanding.kind) pack_again(w, m.dtype, rows, cols);
    free(w), free(x), free(y);
    return fault;
}

static macko_fault try_ec(const input *in) {
    const header *h = &in->h;
    const int64_t size = size_of(h->dtype), base_bytes = h->cols <= 65536 ? 2 : 4, tiles = h->extra;
    const int64_t num_sets = h->bytes[6] / (int64_t)sizeof(macko_ec_set) - 1,
                  blocks = h->bytes[2] / base_bytes / MACKO_EC_WARP;
    macko_fault fault = {-1, 0, 0, 0};
    if (h->rows < 0 || h->rows >= INT32_MAX || h->cols < 0 || h->cols >= INT32_MAX || num_sets < 0) return fault;
    if (num_sets > MACKO_EC_MAX_SETS || h->bytes[6] % (int64_t)sizeof(macko_ec_set) || h->bytes[0] % size ||
        h->bytes[4] % 4)
        return fault;
    if (h->bytes[2] % (base_bytes * MACKO_EC_WARP) || h->bytes[3] != (blocks + num_sets) * 4) return fault;
    if (h->bytes[7] && h->bytes[7] != h->cols * base_bytes) return fault;
    const int64_t tile_rows = macko_ec_tile_rows(h->rows, tiles);
    if (tiles < 0 || tile_rows > MACKO_EC_MAX_TILE || (h->rows + tile_rows - 1) / tile_rows != tiles) return fault;
    if (h->bytes[5] != num_sets * (tiles + 1) * 4) return fault;
    macko_ec_matrix m = {in->arrays[0],
                         in->arrays[1],
                         in->arrays[2],
                         (const int32_t *)in->arrays[3],
                         (const int32_t *)in->arrays[4],
                         (const int32_t *)in->arrays[5],
                         (const macko_ec_set *)in->arrays[6],
                         h->bytes[7] ? in->arrays[7] : NULL,
                         h->rows,
                         h->cols,
                         tiles,
                         tile_rows,
                         num_sets,
                         blocks,
                         h->bytes[0] / size,
                         h->bytes[4] / 4,
                         (macko_dtype)h->dtype};
    fault = macko_ec_check_cpu(&m, h->bytes[1]);
    if (fault.kind || !small(m.rows, m.cols)) return fault;
    uint8_t *w = exactly(m.rows * m.cols * size), *x = exactly(m.cols * size), *y = exactly(m.rows * size);
    float *ordered = exactly(m.cols * 4);
    memset(x, 0x3c, (size_t)(m.cols * size));
    macko_ec_unpack_cpu(&m, 0, tiles, w);
    macko_ec_order_x_cpu(&m, x, ordered);
    macko_ec_spmv_cpu(&m, ordered, NULL, 0, tiles, y);
    pack_again(w, m.dtype, m.rows, m.cols);
    free(w), free(x), free(y), free(ordered);
    return fault;
}

static macko_fault try_tile(const input *in) {
    const header *h = &in->h;
    macko_fault fault = {-1, 0, 0, 0};
    if (h->rows < 0 || h->rows > INT32_MAX || h->cols < 0 || h->cols > INT32_MAX || h->dtype == MACKO_F32) return fault;
    const int64_t slabs = macko_slab_count(h->rows, h->cols);
    if (h->bytes[1] != (slabs + 1) * 4 || h->bytes[0] % MACKO_SLAB_UNIT ||
        h->bytes[0] < slabs * macko_tile_units(0) * MACKO_SLAB_UNIT)
        return fault;
    if (h->extra < (slabs ? macko_tile_units(0) : 0) || h->extra > (slabs ? macko_tile_units(MACKO_TILE_MOST_ROWS) : 0))
        return fault;
    const macko_tile_matrix m = {.data = in->arrays[0],
                                 .offsets = (const int32_t *)in->arrays[1],
                                 .rows = h->rows,
                                 .cols = h->cols,
                                 .widest = (int32_t)h->extra,
                                 .dtype = (macko_dtype)h->dtype,
                                 .units = h->bytes[0] / MACKO_SLAB_UNIT};
    fault = macko_tile_check_cpu(&m);
    if (fault.kind || !small(m.rows, m.cols)) return fault;
    uint16_t *w = exactly(m.rows * m.cols * 2);
    macko_tile_unpack_cpu(&m, 0, m.rows, w);
    int32_t *offsets = exactly((slabs + 1) * 4);
    uint8_t *data = exactly(h->bytes[0]);
    macko_slab_totals totals = {0};
    macko_tile_count_cpu(&m, w, offsets, &totals);
    must(totals.stored == fault.found, "tile: packed anew it has another number of values");
    offsets[0] = 0;
    for (int64_t slab = 0; slab < slabs; slab++) offsets[slab + 1] += offsets[slab];
    macko_tile_matrix again = m;
    again.data = data, again.offsets = offsets;
    must(!memcmp(offsets, m.offsets, (size_t)(slabs + 1) * 4), "tile: packed anew it has other offsets");
    macko_tile_write_cpu(&again, w, data);
    must(!memcmp(data, m.data, (size_t)h->bytes[0]), "tile: packed anew it has other bytes");
    free(w), free(offsets), free(data);
    return fault;
}

/* Rows that begin and end within row blocks: no more is written than asked for, and what all of them have. */
static void unpack_some(const macko_dense12_matrix *m, const uint16_t *w) {
    const int64_t first = below(m->rows + 1), count = below(m->rows - first + 1), bytes = count * m->cols * 2;
    uint16_t *some = exactly(bytes);
    macko_dense12_unpack_cpu(m, first, count, some);
    must(!memcmp(some, w + first * m->cols, (size_t)bytes), "dense12: some rows are not those of all");
    free(some);
}

static macko_fault try_dense12(const input *in) {
    const header *h = &in->h;
    macko_fault fault = {-1, 0, 0, 0};
    if (h->rows < 0 || h->rows > INT32_MAX || h->cols < 0 || h->cols > INT32_MAX ||
        (h->dtype != MACKO_BF16 && h->dtype != MACKO_F16))
        return fault;
    const int64_t slabs = macko_slab_count(h->rows, h->cols), unit = MACKO_SLAB_UNIT;
    if (h->extra < (slabs ? macko_dense12_units(0) : 0) || h->extra > (slabs ? MACKO_DENSE12_MOST_UNITS : 0) ||
        h->bytes[0] % unit || h->bytes[0] / unit != slabs * h->extra)
        return fault;
    for (int i = 0; i < 2; i++)
        if (h->table[i] < 0 || h->table[i] > INT32_MAX) return fault;
    const macko_dense12_matrix m = {
        in->arrays[0],        h->rows, h->cols, (int32_t)h->extra, {(uint32_t)h->table[0], (uint32_t)h->table[1]},
        (macko_dtype)h->dtype};
    fault = macko_dense12_check_cpu(&m);
    if (fault.kind || !small(m.rows, m.cols)) return fault;
    uint16_t *w = exactly(m.rows * m.cols * 2);
    uint8_t *data = exactly(h->bytes[0]);
    macko_dense12_unpack_cpu(&m, 0, m.rows, w);
    unpack_some(&m, w);
    macko_slab_totals totals = {0};
    macko_dense12_count_cpu(&m, w, NULL, &totals);
    must(!slabs || macko_dense12_units((int)totals.fullest) == m.slab_units,
         "dense12: packed anew it has another slab_units");
    must(totals.listed == fault.found, "dense12: packed anew it lists another number of elements");
    macko_dense12_write_cpu(&m, w, data);
    must(!memcmp(data, m.data, (size_t)h->bytes[0]), "dense12: packed anew it has other bytes");
    free(w), free(data);
    return fault;
}

static macko_fault try_sparse11(const input *in) {
    const header *h = &in->h;
    macko_fault fault = {-1, 0, 0, 0};
    if (h->rows < 0 || h->rows > INT32_MAX || h->cols < 0 || h->cols > INT32_MAX || h->dtype == MACKO_F32) return fault;
    const int64_t slabs = macko_slab_count(h->rows, h->cols), least = slabs ? macko_sparse11_units(0, 0) : 0;
    if (h->bytes[1] != (slabs + 1) * 4 || h->bytes[0] % MACKO_SLAB_UNIT || h->bytes[0] < slabs * least * MACKO_SLAB_UNIT)
        return fault;
    if (h->extra < least || h->extra > (slabs ? MACKO_SPARSE11_MOST_UNITS : 0)) return fault;
    for (int i = 0; i < 2; i++)
        if (h->table[i] < 0 || h->table[i] > UINT32_MAX) return fault;
    const macko_sparse11_matrix m = {.data = in->arrays[0],
                                     .offsets = (const int32_t *)in->arrays[1],
                                     .rows = h->rows,
                                     .cols = h->cols,
                                     .widest = (int32_t)h->extra,
                                     .table = {(uint32_t)h->table[0], (uint32_t)h->table[1]},
                                     .units = h->bytes[0] / MACKO_SLAB_UNIT,
                                     .dtype = (macko_dtype)h->dtype};
    fault = macko_sparse11_check_cpu(&m);
    if (fault.kind || !small(m.rows, m.cols)) return fault;
    uint16_t *w = exactly(m.rows * m.cols * 2);
    macko_sparse11_unpack_cpu(&m, 0, m.rows, w);
    const int64_t first = below(m.rows + 1), count = below(m.rows - first + 1), bytes = count * m.cols * 2;
    uint16_t *some = exactly(bytes);
    macko_sparse11_unpack_cpu(&m, first, count, some);
    must(!memcmp(some, w + first * m.cols, (size_t)bytes), "sparse11: some rows are not those of all");
    int32_t *offsets = exactly((slabs + 1) * 4);
    uint8_t *data = exactly(h->bytes[0]);
    macko_slab_totals totals = {0};
    macko_sparse11_count_cpu(&m, w, offsets, &totals);
    must(totals.stored == fault.found, "sparse11: packed anew it has another number of values");
    offsets[0] = 0;
    for (int64_t slab = 0; slab < slabs; slab++) offsets[slab + 1] += offsets[slab];
    macko_sparse11_matrix again = m;
    again.data = data, again.offsets = offsets;
    must(!memcmp(offsets, m.offsets, (size_t)(slabs + 1) * 4), "sparse11: packed anew it has other offsets");
    macko_sparse11_write_cpu(&again, w, data);
    must(!memcmp(data, m.data, (size_t)h->bytes[0]), "sparse11: packed anew it has other bytes");
    free(w), free(some), free(offsets), free(data);
    return fault;
}

/* Codes from the numbers that they stand for, in place: of a weight that was unpacked with scales of 1. */
static uint8_t *codes_of(uint16_t *w, int64_t count, macko_byte_kind kind, macko_dtype dtype) {
    uint8_t *codes = exactly(count), *of = exactly(1 << 16);
    for (int code = 0; code < 256; code++) {
        uint16_t bits;
        macko_store(&bits, dtype, 0, macko_byte_value(kind, (uint8_t)code));
        if (macko_byte_is_valid(kind, (uint8_t)code)) of[bits] = (uint8_t)code;
    }
    for (int64_t i = 0; i < count; i++) codes[i] = of[w[i]];
    free(of);
    return codes;
}

/* Whether sizes are such as ops.cpp lets pass, of dense8 and sparse8. */
static int bytes_pass(const header *h, int64_t scale_bytes) {
    return h->rows >= 0 && h->rows <= INT32_MAX && h->cols >= 0 && h->cols <= INT32_MAX && h->dtype != MACKO_F32 &&
           h->table[0] >= 0 && h->table[0] < MACKO_BYTE_KINDS && scale_bytes == h->rows * 4;
}

static float *ones(int64_t count) {
    float *all = exactly(count * 4);
    for (int64_t i = 0; i < count; i++) all[i] = 1;
    return all;
}

static macko_fault try_dense8(const input *in) {
    const header *h = &in->h;
    macko_fault fault = {-1, 0, 0, 0};
    if (!bytes_pass(h, h->bytes[1])) return fault;
    const int64_t slabs = macko_slab_count(h->rows, h->cols);
    if (h->bytes[0] % MACKO_DENSE8_SLAB_BYTES || h->bytes[0] / MACKO_DENSE8_SLAB_BYTES != slabs) return fault;
    macko_dense8_matrix m = {.data = in->arrays[0],
                             .scales = (const float *)in->arrays[1],
                             .rows = h->rows,
                             .cols = h->cols,
                             .kind = (macko_byte_kind)h->table[0],
                             .dtype = (macko_dtype)h->dtype};
    fault = macko_dense8_check_cpu(&m);
    if (fault.kind || !small(m.rows, m.cols)) return fault;
    uint16_t *w = exactly(m.rows * m.cols * 2);
    macko_dense8_unpack_cpu(&m, 0, m.rows, w);
    const int64_t first = below(m.rows + 1), count = below(m.rows - first + 1), bytes = count * m.cols * 2;
    uint16_t *some = exactly(bytes);
    macko_dense8_unpack_cpu(&m, first, count, some);
    must(!memcmp(some, w + first * m.cols, (size_t)bytes), "dense8: some rows are not those of all");
    float *scales = ones(m.rows);
    m.scales = scales;
    macko_dense8_unpack_cpu(&m, 0, m.rows, w);
    uint8_t *codes = codes_of(w, m.rows * m.cols, m.kind, m.dtype), *data = exactly(h->bytes[0]);
    macko_dense8_write_cpu(&m, codes, data);
    must(!memcmp(data, m.data, (size_t)h->bytes[0]), "dense8: packed anew it has other bytes");
    free(w), free(some), free(scales), free(codes), free(data);
    return fault;
}

static macko_fault try_sparse8(const input *in) {
    const header *h = &in->h;
    macko_fault fault = {-1, 0, 0, 0};
    if (!bytes_pass(h, h->bytes[2])) return fault;
    const int64_t slabs = macko_slab_count(h->rows, h->cols), least = slabs ? macko_sparse8_units(0) : 0;
    if (h->bytes[1] != (slabs + 1) * 4 || h->bytes[0] % MACKO_SLAB_UNIT || h->bytes[0] < slabs * least * MACKO_SLAB_UNIT)
        return fault;
    if (h->extra < least || h->extra > (slabs ? macko_sparse8_units(MACKO_SPARSE8_MOST_ROWS) : 0)) return fault;
    macko_sparse8_matrix m = {.data = in->arrays[0],
                              .offsets = (const int32_t *)in->arrays[1],
                              .scales = (const float *)in->arrays[2],
                              .rows = h->rows,
                              .cols = h->cols,
                              .widest = (int32_t)h->extra,
                              .units = h->bytes[0] / MACKO_SLAB_UNIT,
                              .kind = (macko_byte_kind)h->table[0],
                              .dtype = (macko_dtype)h->dtype};
    fault = macko_sparse8_check_cpu(&m);
    if (fault.kind || !small(m.rows, m.cols)) return fault;
    uint16_t *w = exactly(m.rows * m.cols * 2);
    macko_sparse8_unpack_cpu(&m, 0, m.rows, w);
    const int64_t first = below(m.rows + 1), count = below(m.rows - first + 1), bytes = count * m.cols * 2;
    uint16_t *some = exactly(bytes);
    macko_sparse8_unpack_cpu(&m, first, count, some);
    must(!memcmp(some, w + first * m.cols, (size_t)bytes), "sparse8: some rows are not those of all");
    float *scales = ones(m.rows);
    m.scales = scales;
    macko_sparse8_unpack_cpu(&m, 0, m.rows, w);
    uint8_t *codes = codes_of(w, m.rows * m.cols, m.kind, m.dtype), *data = exactly(h->bytes[0]);
    int32_t *offsets = exactly((slabs + 1) * 4);
    macko_slab_totals totals = {0};
    macko_sparse8_count_cpu(&m, codes, offsets, &totals);
    must(totals.stored == fault.found, "sparse8: packed anew it has another number of values");
    offsets[0] = 0;
    for (int64_t slab = 0; slab < slabs; slab++) offsets[slab + 1] += offsets[slab];
    must(!memcmp(offsets, m.offsets, (size_t)(slabs + 1) * 4), "sparse8: packed anew it has other offsets");
    m.offsets = offsets;
    macko_sparse8_write_cpu(&m, codes, data);
    must(!memcmp(data, m.data, (size_t)h->bytes[0]), "sparse8: packed anew it has other bytes");
    free(w), free(some), free(scales), free(codes), free(data), free(offsets);
    return fault;
}

/* Of tiles that pass the border, as n says: quantised tokens are multiplied, the codes unpacked and packed again. Any
 * bytes are safe to run; a fault is what packing does not give. */
static macko_fault try_tiles(const input *in, int which, int64_t n) {
    const header *h = &in->h;
    const int64_t rows = h->rows, cols = h->cols, tokens = below(4);
    macko_fault fault = {-1, 0, 0, 0};
    if (n < 0 || n == 1 || n > MACKO_SLIDE_MAX_N || cols < 0 || cols > MACKO_SLIDE_MAX_COLS || h->table[0] < 0 ||
        h->table[0] > MACKO_SLIDE_BF16 || h->bytes[1] % 4 || h->bytes[1] / 4 != rows)
        return fault;
    const macko_slide_shape shape = {rows, cols, (int)n, (macko_slide_type)h->table[0]};
    const int64_t tiles = macko_slide_row_blocks(rows) * macko_slide_k_tiles(cols, shape.n, shape.type);
    if (h->bytes[which] != tiles * macko_slide_tile_bytes(shape.n, shape.type)) return fault;
    if (!small(rows, cols)) return (macko_fault){0};
    const int64_t depth = macko_slide_depth(cols, shape.n), size = macko_slide_element_bytes(shape.type);
    const macko_slide_weight weight = {shape, in->arrays[which], (const float *)in->arrays[1]};
    uint8_t *x = exactly(tokens * cols * size_of(h->dtype)), *lifted = exactly(tokens * depth * size);
    float *token_scale = exactly(tokens * 4), *scale = exactly(rows * 4);
    for (int64_t i = 0; i < tokens * cols * size_of(h->dtype); i++) x[i] = (uint8_t)next_random();
    must(!macko_slide_quant_cpu(x, (macko_dtype)h->dtype, cols, shape.n, shape.type, 0, tokens, lifted, token_scale),
         "slide: no memory");
    uint8_t *out = exactly(tokens * rows * size_of(h->dtype)), *codes = exactly(rows * cols * size);
    const macko_slide_gemm_args args = {.weight = weight,
                                        .lifted = lifted,
                                        .token_scale = token_scale,
                                        .out = out,
                                        .tokens = tokens,
                                        .out_dtype = (macko_dtype)h->dtype};
    const int64_t first = below(rows + 1);
    must(!macko_slide_gemm_cpu(&args, 0, first) && !macko_slide_gemm_cpu(&args, first, rows), "slide: no memory");
    macko_slide_unpack_cpu(&weight, first, rows, codes);
    macko_slide_unpack_cpu(&weight, 0, first, codes);
    static const macko_slide_source sources[] = {MACKO_SLIDE_FROM_S8, MACKO_SLIDE_FROM_E4M3, MACKO_SLIDE_FROM_F16,
                                                 MACKO_SLIDE_FROM_BF16};
    uint8_t *again = exactly(h->bytes[which]);
    macko_slide_found found;
    must(!macko_slide_pack_cpu(&shape, codes, sources[shape.type], 0, 0, rows, again, scale, &found),
         "slide: no memory");
    must(found.row < 0, "slide: unpacked, and not of its pattern");
    fault.kind = memcmp(again, in->arrays[which], (size_t)h->bytes[which]) != 0;
    free(x), free(lifted), free(token_scale), free(scale), free(out), free(codes), free(again);
    return fault;
}

static macko_fault try_slide(const input *in) {
    const macko_fault fault = try_tiles(in, 0, in->h.extra);
    return fault.kind || !in->h.bytes[2] ? fault : try_tiles(in, 2, 0); /* which holds the same weight dense */
}

static macko_fault try_planes12(const input *in) {
    const header *h = &in->h;
    const int64_t rows = h->rows, cols = h->cols, listed = h->bytes[4] / 4;
    macko_fault fault = {-1, 0, 0, 0};
    if (rows < 0 || rows > INT32_MAX || cols < 0 || cols > INT32_MAX || h->dtype == MACKO_F32) return fault;
    if (h->bytes[0] != rows * cols || h->bytes[1] != rows * macko_planes12_high_bytes(cols) || h->bytes[2] != 8 ||
        h->bytes[3] != (rows + 1) * 4 || h->bytes[4] % 4 || h->bytes[5] != listed * 2)
        return fault;
    macko_planes12 m = {.low = in->arrays[0],
                        .high = in->arrays[1],
                        .table = in->arrays[2],
                        .row_ptr = (const int32_t *)in->arrays[3],
                        .columns = (const int32_t *)in->arrays[4],
                        .values = (const uint16_t *)in->arrays[5],
                        .rows = rows,
                        .cols = cols,
                        .listed = listed,
                        .dtype = (macko_dtype)h->dtype};
    fault = macko_planes12_check_cpu(&m, 0, rows);
    if (!small(rows, cols)) return fault;
    uint16_t *w = exactly(rows * cols * 2), *again = exactly(rows * cols * 2);
    const macko_fault unpacking = macko_planes12_unpack_cpu(&m, 0, rows, w);
    must(fault.kind || !unpacking.kind, "planes12: check and unpack disagree");
    if (!fault.kind) { /* whose table is one */
        int64_t *counts = exactly(rows * 8), next = 0;
        macko_planes12_count_cpu(&m, w, 0, rows, counts);
        int32_t *row_ptr = exactly((rows + 1) * 4);
        for (int64_t row = 0; row < rows; row++) row_ptr[row] = (int32_t)next, next += counts[row];
        row_ptr[rows] = (int32_t)next;
        must(next == listed, "planes12: packed anew it lists another number of elements");
        uint8_t *low = exactly(h->bytes[0]), *high = exactly(h->bytes[1]);
        int32_t *columns = exactly(next * 4);
        uint16_t *values = exactly(next * 2);
        m.row_ptr = row_ptr;
        macko_planes12_write_cpu(&m, w, 0, rows, low, high, columns, values);
        m.low = low, m.high = high, m.columns = columns, m.values = values;
        must(!macko_planes12_check_cpu(&m, 0, rows).kind, "planes12: packed anew, and refused");
        must(!macko_planes12_unpack_cpu(&m, 0, rows, again).kind && !memcmp(again, w, (size_t)(rows * cols * 2)),
             "planes12: packed anew it is another weight");
        free(counts), free(row_ptr), free(low), free(high), free(columns), free(values);
    }
    free(w), free(again);
    return fault;
}

/* Of any bytes: whether they are an input. Then each array is an allocation of just its size. */
static int parse(const uint8_t *data, size_t size, input *in) {
    header *h = &in->h;
    if (size < sizeof *h) return 0;
    memcpy(h, data, sizeof *h);
    if (h->kind < 0 || h->kind >= KINDS || h->dtype < 0 || h->dtype > MACKO_F32) return 0;
    if (h->num_arrays < 1 || h->num_arrays > MAX_ARRAYS) return 0;
    int64_t left = (int64_t)(size - sizeof *h);
    for (int i = 0; i < MAX_ARRAYS; left -= h->bytes[i++])
        if (h->bytes[i] < 0 || h->bytes[i] > left) return 0;
    data += sizeof *h;
    for (int i = 0; i < MAX_ARRAYS; data += h->bytes[i++])
        in->arrays[i] = memcpy(exactly(h->bytes[i]), data, (size_t)h->bytes[i]);
    return 1;
}

static void release(input *in) {
    for (int i = 0; i < MAX_ARRAYS; i++) free(in->arrays[i]);
}

/* Changes an input in place, where there is room; its size now. */
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    input in;
    if (!parse(data, size, &in)) return size;
    begin_random(seed);
    for (int64_t changes = 1 + below(3); changes; changes--) change(&in);
    size_t now = sizeof in.h;
    for (int i = 0; i < MAX_ARRAYS; i++) now += (size_t)in.h.bytes[i];
    if (now <= max_size) {
        memcpy(data, &in.h, sizeof in.h);
        data += sizeof in.h;
        for (int i = 0; i < MAX_ARRAYS; data += in.h.bytes[i++]) memcpy(data, in.arrays[i], (size_t)in.h.bytes[i]);
        size = now;
    }
    release(&in);
    return size;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static macko_fault (*const tries[KINDS])(const input *) = {
        try_macko,    try_bitmap, try_ec,      try_tile,  try_dense12,
        try_sparse11, try_dense8, try_sparse8, try_slide, try_planes12};
    static const char *const paths[] = {"cpu=scalar", "cpu=avx2", "cpu=avx512"};
    input in;
    if (!parse(data, size, &in)) return 0;
    uint64_t hash = size; /* what is chosen depends on the input alone, so that it shows its fault again */
    for (size_t i = 0; i < size; i++) hash = (hash ^ data[i]) * 0x100000001b3u;
    begin_random(hash);
    macko_knobs_set(paths[below(3)]);
    (tries[in.h.kind](&in).kind ? refused : accepted)[in.h.kind]++;
    release(&in);
    return 0;
}

#ifndef LIBFUZZER
int main(int count, char **arguments) {
    enum { MAX_INPUTS = 4096, ROOM = 1 << 12 }; /* a case may be longer by so many bytes */
    static const char *const names[KINDS] = {"macko",    "bitmap", "ec",      "tile",  "dense12",
                                             "sparse11", "dense8", "sparse8", "slide", "planes12"};
    static uint8_t *corpus[MAX_INPUTS];
    static size_t sizes[MAX_INPUTS];
    must(count >= 3, "usage: fuzz_core CORPUS_FOLDER SECONDS [SEED]");
    int num_inputs = 0;
    size_t largest = 0;
    DIR *folder = opendir(arguments[1]);
    must(folder != NULL, arguments[1]);
    for (struct dirent *entry; (entry = readdir(folder)) && num_inputs < MAX_INPUTS;) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", arguments[1], entry->d_name);
        if (entry->d_name[0] == '.') continue;
        FILE *file = fopen(path, "rb");
        must(file && !fseek(file, 0, SEEK_END), path);
        const size_t size = sizes[num_inputs] = (size_t)ftell(file);
        uint8_t *data = corpus[num_inputs] = exactly((int64_t)size);
        rewind(file);
        must(fread(data, 1, size, file) == size, path);
        fclose(file);
        LLVMFuzzerTestOneInput(data, size);
        if (size > largest) largest = size;
        num_inputs++;
    }
    closedir(folder);
    int64_t honest = 0;
    for (int kind = 0; kind < KINDS; kind++) honest += accepted[kind];
    must(num_inputs > 0 && honest == num_inputs, "the corpus is empty, or an honest weight is refused");
    const uint64_t seed = (count > 3 ? (uint64_t)atoll(arguments[3]) : 0) << 40;
    const time_t stop = time(NULL) + atoll(arguments[2]);
    uint8_t *data = exactly((int64_t)largest + ROOM);
    int64_t cases = 0;
    for (; cases % 256 || time(NULL) < stop; cases++) {
        begin_random(seed + (uint64_t)cases);
        const int i = (int)below(num_inputs);
        memcpy(data, corpus[i], sizes[i]);
        const size_t size = LLVMFuzzerCustomMutator(data, sizes[i], largest + ROOM, (unsigned)next_random());
        LLVMFuzzerTestOneInput(data, size);
    }
    printf("%lld cases; accepted, refused:", (long long)cases);
    for (int kind = 0; kind < KINDS; kind++)
        printf(" %s %lld, %lld;", names[kind], (long long)accepted[kind], (long long)refused[kind]);
    printf("\n");
    for (int i = 0; i < num_inputs; i++) free(corpus[i]);
    free(data);
    return 0;
}
#endif
