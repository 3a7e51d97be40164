/* Packing and unpacking of EC-CSR on the CPU, and its checks. Extraction is in extract_cpu.c. */
#include <stdlib.h>
#include <string.h>

#include "../../csrc/core/cpu.h"
#include "plan.h"

static inline int is_zero(const void *w, macko_dtype dtype, int64_t i) {
    if (dtype == MACKO_F32) return (((const uint32_t *)w)[i] & 0x7fffffffu) == 0;
    return (((const uint16_t *)w)[i] & 0x7fff) == 0;
}

static inline int64_t least(int64_t a, int64_t b) {
    return a < b ? a : b;
}

void macko_ec_column_counts_cpu(const void *w, macko_dtype dtype, int64_t rows, int64_t cols, int32_t *counts) {
    memset(counts, 0, (size_t)cols * sizeof *counts);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t col = 0; col < cols; col++) counts[col] += !is_zero(w, dtype, row * cols + col);
}

void macko_ec_bits_cpu(const macko_ec_plan *p, int64_t begin, int64_t end) {
    macko_nonzeros *const nonzeros = macko_nonzeros_of(macko_best_cpu_path());
    for (int64_t row = begin * p->tile_rows; row < least(end * p->tile_rows, p->rows); row++) {
        int32_t count = 0;
        for (int64_t word = 0; word < p->words; word++) {
            const int64_t col = word * 64, bits = least(64, p->cols - col);
            uint64_t mask = 0;
            if (!p->col_order)
                mask = nonzeros(p->w, p->dtype, row * p->cols + col, (int)bits);
            else
                for (int64_t bit = 0; bit < bits; bit++) {
                    const int64_t from = macko_ec_column(p->col_order, p->cols, col + bit);
                    mask |= (uint64_t)!is_zero(p->w, p->dtype, row * p->cols + from) << bit;
                }
            p->bits[row * p->words + word] = mask;
            count += __builtin_popcountll(mask);
        }
        p->row_counts[row] = count;
    }
}

/* For sorting: larger keys first, then in the order of index. */
typedef struct sized {
    int32_t key, index;
} sized;

static int larger_first(const void *a, const void *b) {
    const sized *left = a, *right = b;
    if (left->key != right->key) return left->key > right->key ? -1 : 1;
    return left->index < right->index ? -1 : left->index > right->index;
}

/* places[i] = index of the entry of `sorted` that is stored at place i. */
static void spread(const sized *sorted, int32_t n, int32_t *places) {
    const int bits = macko_ec_log2_up((uint32_t)n);
    int32_t place = 0;
    for (uint32_t v = 0; place < n; v++) {
        const uint32_t from = macko_ec_reverse(v, bits);
        if (from < (uint32_t)n) places[place++] = sorted[from].index;
    }
}

static int64_t single_at(const macko_ec_plan *p, int set, int64_t tile) {
    return (set * p->tiles + tile) * p->tile_rows;
}

static void set_count(const macko_ec_plan *p, int set, int64_t tile, int64_t blocks, int64_t columns) {
    p->counts[(set * p->tiles + tile) * 2] = blocks;
    p->counts[(set * p->tiles + tile) * 2 + 1] = columns;
}

static void arrange_heights(const macko_ec_plan *p, int64_t tile, sized *sorted) {
    const macko_ec_block *blocks = p->blocks + p->columns_at[tile] / MACKO_EC_CHUNK;
    int32_t *order = p->order + p->columns_at[tile] / MACKO_EC_CHUNK;
    for (int set = 0; set < MACKO_EC_HEIGHT_SETS; set++) {
        int32_t n = 0;
        int64_t columns = 0;
        for (int32_t i = 0; i < p->num_blocks[tile]; i++) {
            if (!blocks[i].width || macko_ec_height_set(blocks[i].height) != set) continue;
            sorted[n++] = (sized){blocks[i].width, i};
            columns += blocks[i].width;
        }
        qsort(sorted, (size_t)n, sizeof *sorted, larger_first);
        spread(sorted, n, order);
        order += n;
        set_count(p, set, tile, n, columns);
    }
}

/* The paper's single rows: a long part and a short one. */
static void arrange_parts(const macko_ec_plan *p, int64_t tile, int num_rows, sized *sorted) {
    const int32_t delta_max = (1 << p->options.delta_bits) - 1;
    macko_ec_parts parts[MACKO_EC_TILE];
    int32_t places[MACKO_EC_TILE];
    for (int row = 0; row < num_rows; row++) {
        const uint64_t *bits = p->bits + (tile * MACKO_EC_TILE + row) * p->words;
        parts[row] = macko_ec_split_row(macko_ec_walk_from(bits, NULL, 0, p->words), delta_max);
    }
    for (int part = 0; part < 2; part++) {
        const int set = MACKO_EC_HEIGHT_SETS + part;
        const int64_t at = single_at(p, set, tile);
        int32_t n = 0;
        int64_t columns = 0;
        for (int row = 0; row < num_rows; row++)
            if (parts[row].width[part]) {
                sorted[n++] = (sized){parts[row].width[part], row};
                columns += (int64_t)parts[row].width[part] * MACKO_EC_WARP;
            }
        qsort(sorted, (size_t)n, sizeof *sorted, larger_first);
        spread(sorted, n, places);
        for (int32_t i = 0; i < n; i++) {
            p->single_row[at + i] = places[i];
            p->single_width[at + i] = parts[places[i]].width[part];
            p->single_skip[at + i] = part ? parts[places[i]].skip : 0;
        }
        set_count(p, set, tile, n, columns);
    }
}

/* Single rows on few lanes: rows of like size share a block. */
static void arrange_slab(const macko_ec_plan *p, int slab, int64_t tile, int num_rows, sized *sorted) {
    const int set = MACKO_EC_HEIGHT_SETS + slab, lanes = p->options.lanes, pieces = MACKO_EC_WARP / lanes;
    const int32_t delta_max = (1 << p->options.slab_bits[slab]) - 1;
    const int64_t word = p->options.slab_begin[slab] / 64, end = (p->options.slab_begin[slab + 1] + 63) / 64;
    const int64_t at = single_at(p, set, tile);
    for (int row = 0; row < num_rows; row++) {
        const uint64_t *bits = p->bits + (tile * p->tile_rows + row) * p->words;
        sorted[row] = (sized){macko_ec_entries(macko_ec_walk_from(bits, NULL, word, end), delta_max), row};
    }
    qsort(sorted, (size_t)num_rows, sizeof *sorted, larger_first);
    int64_t blocks = 0, columns = 0;
    for (int first = 0; p->cols && first < num_rows; first += pieces) {
        const int last = (int)least(first + pieces, num_rows);
        /* One endless lane bounds the largest row; lane starts save zeros, so fewer columns may do for all. */
        int32_t t = (sorted[first].key + lanes * MACKO_EC_VECTOR - 1) / (lanes * MACKO_EC_VECTOR) * MACKO_EC_VECTOR;
        if (!t) t = MACKO_EC_VECTOR; /* empty rows stand in the set too */
        for (int fit = 1; fit && t > MACKO_EC_VECTOR;) {
            for (int i = first; fit && i < last; i++) {
                const uint64_t *bits = p->bits + (tile * p->tile_rows + sorted[i].index) * p->words;
                fit = !macko_ec_fill(macko_ec_walk_from(bits, NULL, word, end), 0, lanes, t - MACKO_EC_VECTOR,
                                     delta_max, NULL)
                           .more;
            }
            if (fit) t -= MACKO_EC_VECTOR;
        }
        for (int i = first; i < first + pieces; i++) {
            p->single_row[at + i] = i < last ? sorted[i].index : -1;
            p->single_width[at + i] = t;
        }
        blocks++;
        columns += (int64_t)MACKO_EC_WARP * t;
    }
    set_count(p, set, tile, blocks, columns);
}

int macko_ec_arrange_cpu(const macko_ec_plan *p, int64_t begin, int64_t end) {
    int64_t most = p->tile_rows;
    for (int64_t tile = begin; tile < end; tile++)
        if (p->options.max_height > 1 && p->num_blocks[tile] > most) most = p->num_blocks[tile];
    sized *sorted = malloc((size_t)most * sizeof *sorted);
    if (!sorted) return -1;
    for (int64_t tile = begin; tile < end; tile++) {
        const int num_rows = (int)least(p->tile_rows, p->rows - tile * p->tile_rows);
        for (int set = 0; set < MACKO_EC_MAX_SETS; set++) set_count(p, set, tile, 0, 0);
        if (p->options.max_height > 1) arrange_heights(p, tile, sorted);
        if (!p->options.num_slabs) arrange_parts(p, tile, num_rows, sorted);
        for (int slab = 0; slab < p->options.num_slabs; slab++) arrange_slab(p, slab, tile, num_rows, sorted);
    }
    free(sorted);
    return 0;
}

static inline int64_t value_bytes(macko_dtype dtype) {
    return dtype == MACKO_F32 ? 4 : 2;
}

static inline int base_bytes(int64_t cols) {
    return cols <= 65536 ? 2 : 4;
}

/* Everything of one block but its rows, ready for macko_ec_put. */
static macko_ec_sink sink_of(const macko_ec_plan *p, const macko_ec_matrix *m, const macko_ec_set *set, int64_t block,
                             int64_t column) {
    const int64_t value = set->first_value + column * set->height;
    return (macko_ec_sink){
        .col_order = p->col_order,
        .cols = p->cols,
        .values = (char *)m->block_values + value * value_bytes(p->dtype),
        .bases = (char *)m->base_indices + (set->first_block + block) * MACKO_EC_WARP * base_bytes(p->cols),
        .deltas = (uint32_t *)(m->delta_indices + set->first_delta + column * set->delta_bits / 8),
        .vector = (int32_t)set->vector,
        .delta_bits = (int32_t)set->delta_bits,
        .value_bytes = (int32_t)value_bytes(p->dtype),
    };
}

static const void *row_of(const macko_ec_plan *p, int64_t row) {
    return (const char *)p->w + row * p->cols * value_bytes(p->dtype);
}

static void write_shared(const macko_ec_plan *p, const macko_ec_block *block, const int32_t *columns, int64_t first_row,
                         macko_ec_sink *sink, int32_t *row_indices) {
    const int32_t t = block->width / MACKO_EC_WARP;
    for (int32_t k = 0; k < block->height; k++) {
        row_indices[k] = (int32_t)(first_row + block->rows[k]);
        sink->w = row_of(p, row_indices[k]);
        for (int32_t c = 0; c < block->width; c++)
            macko_ec_put_value(sink, macko_ec_number(c / t, c % t, MACKO_EC_VECTOR) * block->height + k, columns[c]);
    }
    for (int32_t c = 0; c < block->width; c++) {
        if (c % t == 0)
            macko_ec_put_base(sink, c / t, columns[c]);
        else
            macko_ec_put_delta(sink->deltas, sink->delta_bits, macko_ec_number(c / t, c % t, MACKO_EC_VECTOR),
                               (uint32_t)(columns[c] - columns[c - 1]));
    }
}

static void write_single(const macko_ec_plan *p, const macko_ec_set *set, int plan_set, int64_t tile, int64_t at,
                         macko_ec_sink *sink, int32_t *row_indices) {
    const int slab = p->options.num_slabs ? plan_set - MACKO_EC_HEIGHT_SETS : -1;
    const int64_t word = slab < 0 ? 0 : p->options.slab_begin[slab] / 64;
    const int64_t end = slab < 0 ? p->words : (p->options.slab_begin[slab + 1] + 63) / 64;
    const int32_t t = p->single_width[at], skip = slab < 0 ? p->single_skip[at] : 0;
    for (int32_t piece = 0; piece < MACKO_EC_WARP / set->lanes; piece++) {
        const int32_t local = p->single_row[at + piece];
        const int64_t row = tile * p->tile_rows + local;
        row_indices[piece] = local < 0 ? -1 : (int32_t)row;
        sink->lane = piece * (int32_t)set->lanes;
        sink->w = local < 0 ? NULL : row_of(p, row);
        const macko_ec_walk walk =
            macko_ec_walk_from(local < 0 ? NULL : p->bits + row * p->words, NULL, word, local < 0 ? word : end);
        macko_ec_fill(walk, skip, (int32_t)set->lanes, t, (1 << set->delta_bits) - 1, sink);
    }
}

void macko_ec_write_cpu(const macko_ec_plan *p, const macko_ec_matrix *m, const int32_t *plan_sets, int64_t begin,
                        int64_t end) {
    for (int64_t tile = begin; tile < end; tile++) {
        const int32_t *order = p->order ? p->order + p->columns_at[tile] / MACKO_EC_CHUNK : NULL;
        for (int64_t s = 0; s < m->num_sets; s++) {
            const macko_ec_set *set = &m->sets[s];
            const int plan_set = plan_sets[s];
            const int64_t rows_a_block = MACKO_EC_WARP / set->lanes * set->height;
            const int32_t *tile_ptr = m->tile_ptr + s * (m->tiles + 1);
            int32_t *indptr = (int32_t *)m->block_indptr + set->first_block + s;
            int64_t column = p->counts[(plan_set * p->tiles + tile) * 2 + 1];
            for (int64_t block = tile_ptr[tile]; block < tile_ptr[tile + 1]; block++) {
                macko_ec_sink sink = sink_of(p, m, set, block, column);
                int32_t *row_indices = (int32_t *)m->row_indices + set->first_row + block * rows_a_block;
                indptr[block] = (int32_t)column;
                if (plan_set < MACKO_EC_HEIGHT_SETS) {
                    const macko_ec_block *shared = p->blocks + p->columns_at[tile] / MACKO_EC_CHUNK + *order++;
                    write_shared(p, shared, p->columns + p->columns_at[tile] + shared->first, tile * MACKO_EC_TILE,
                                 &sink, row_indices);
                    column += shared->width;
                } else {
                    const int64_t at =
                        single_at(p, plan_set, tile) + (block - tile_ptr[tile]) * (MACKO_EC_WARP / set->lanes);
                    write_single(p, set, plan_set, tile, at, &sink, row_indices);
                    column += (int64_t)p->single_width[at] * MACKO_EC_WARP;
                }
            }
            if (tile + 1 == m->tiles) indptr[tile_ptr[m->tiles]] = (int32_t)column;
        }
    }
}

static inline uint32_t delta_at(const macko_ec_matrix *m, const macko_ec_set *set, int64_t n) {
    const int64_t bit = n * set->delta_bits;
    const uint8_t *bytes = m->delta_indices + set->first_delta + (bit >> 3);
    uint32_t word = bytes[0];
    if ((bit & 7) + set->delta_bits > 8) word |= (uint32_t)bytes[1] << 8;
    return word >> (bit & 7) & ((1u << set->delta_bits) - 1);
}

static inline uint32_t value_at(const macko_ec_matrix *m, int64_t i) {
    return m->dtype == MACKO_F32 ? ((const uint32_t *)m->block_values)[i] : ((const uint16_t *)m->block_values)[i];
}

typedef struct block_entry {
    int64_t row, col, index; /* index of the value; row -1: none */
} block_entry;

/* Calls visit for each stored value of a block; stops and returns 0 when visit does. */
typedef int visit_entry(const macko_ec_matrix *m, const block_entry *entry, void *context);

static int each_value(const macko_ec_matrix *m, const macko_ec_set *set, int64_t s, int64_t block, visit_entry *visit,
                      void *context) {
    const int32_t *indptr = m->block_indptr + set->first_block + s;
    const int64_t t = (indptr[block + 1] - indptr[block]) / MACKO_EC_WARP;
    const int64_t pieces = MACKO_EC_WARP / set->lanes;
    for (int lane = 0; lane < MACKO_EC_WARP; lane++) {
        block_entry entry = {
            .col = macko_ec_column(m->base_indices, m->cols, (set->first_block + block) * MACKO_EC_WARP + lane)};
        for (int64_t c = 0; c < t; c++) {
            const int64_t n = indptr[block] + macko_ec_number(lane, c, (int32_t)set->vector);
            entry.col += delta_at(m, set, n);
            for (int64_t k = 0; k < set->height; k++) {
                entry.row = m->row_indices[set->first_row + (block * pieces + lane / set->lanes) * set->height + k];
                entry.index = set->first_value + n * set->height + k;
                if (!visit(m, &entry, context)) return 0;
            }
        }
    }
    return 1;
}

static int write_dense(const macko_ec_matrix *m, const block_entry *entry, void *w) {
    if (entry->row < 0 || is_zero(m->block_values, m->dtype, entry->index)) return 1;
    const int64_t col = macko_ec_column(m->col_order, m->cols, entry->col);
    const size_t bytes = (size_t)value_bytes(m->dtype);
    memcpy((char *)w + (entry->row * m->cols + col) * (int64_t)bytes,
           (const char *)m->block_values + entry->index * (int64_t)bytes, bytes);
    return 1;
}

void macko_ec_unpack_cpu(const macko_ec_matrix *m, int64_t begin, int64_t end, void *w) {
    const int64_t row = least(begin * m->tile_rows, m->rows), stop = least(end * m->tile_rows, m->rows);
    memset((char *)w + row * m->cols * value_bytes(m->dtype), 0,
           (size_t)((stop - row) * m->cols * value_bytes(m->dtype)));
    for (int64_t s = 0; s < m->num_sets; s++) {
        const int32_t *tile_ptr = m->tile_ptr + s * (m->tiles + 1);
        for (int64_t block = tile_ptr[begin]; block < tile_ptr[end]; block++)
            each_value(m, &m->sets[s], s, block, write_dense, w);
    }
}

/* A place of a tile, row by row, and the value that stands there. */
typedef struct value_place {
    int64_t place, index;
} value_place;

/* What check carries through a tile. */
typedef struct checking {
    macko_fault fault;
    int64_t set, first_row;
    uint8_t *seen;       /* a bit for each place of the tile; or, where that would be more than its values, NULL and */
    value_place *places; /* the places of the non-zeros, for sorting */
    int64_t num_places;
} checking;

static int look(const macko_ec_matrix *m, const block_entry *entry, void *context) {
    checking *check = context;
    macko_fault *fault = &check->fault;
    *fault = (macko_fault){.row = check->set, .entry = entry->index};
    const uint32_t value = value_at(m, entry->index);
    if (entry->col >= m->cols) {
        fault->kind = MACKO_EC_COLUMN;
        fault->found = entry->col;
    } else if (value == (m->dtype == MACKO_F32 ? 0x80000000u : 0x8000u)) {
        fault->kind = MACKO_EC_ZERO;
    } else if (value) {
        if (entry->row < 0) {
            fault->kind = MACKO_EC_ROW;
            fault->found = -1;
            return 0;
        }
        const int64_t place = (entry->row - check->first_row) * m->cols + entry->col;
        if (!check->seen) {
            check->places[check->num_places++] = (value_place){place, entry->index};
            return 1;
        }
        if (check->seen[place >> 3] >> (place & 7) & 1) {
            fault->kind = MACKO_EC_TWICE;
            fault->found = entry->col;
        }
        check->seen[place >> 3] |= (uint8_t)(1 << (place & 7));
    }
    return !fault->kind;
}

static int by_place(const void *a, const void *b) {
    const value_place *left = a, *right = b;
    if (left->place != right->place) return left->place < right->place ? -1 : 1;
    return left->index < right->index ? -1 : left->index > right->index;
}

static macko_fault fault_of(int64_t kind, int64_t set, int64_t entry, int64_t found) {
    return (macko_fault){.kind = kind, .row = set, .entry = entry, .found = found};
}

/* Sets and index arrays: all that must hold before a block may be looked at. */
static macko_fault check_structure(const macko_ec_matrix *m, int64_t num_delta_bytes) {
    int64_t blocks = 0, rows = 0, values = 0, deltas = 0;
    for (int64_t s = 0; s <= m->num_sets; s++) {
        const macko_ec_set *set = &m->sets[s];
        if (set->first_block != blocks || set->first_row != rows || set->first_value != values ||
            set->first_delta != deltas)
            return fault_of(MACKO_EC_SET, s, -1, set->first_block);
        if (s == m->num_sets) break;
        const int64_t h = set->height, l = set->lanes, v = set->vector;
        const int good = h >= 1 && h <= MACKO_EC_MAX_HEIGHT && !(h & (h - 1)) && l >= 1 && l <= MACKO_EC_WARP &&
                         !(l & (l - 1)) && (v == MACKO_EC_VECTOR || (v == 1 && h == 1 && l == MACKO_EC_WARP)) &&
                         (h == 1 || l == MACKO_EC_WARP) && set->delta_bits >= 3 && set->delta_bits <= 8;
        if (!good || set[1].first_block < blocks || set[1].first_block > m->num_blocks)
            return fault_of(MACKO_EC_SET, s, -1, set[1].first_block);
        const int64_t num = set[1].first_block - blocks;
        const int32_t *tile_ptr = m->tile_ptr + s * (m->tiles + 1), *indptr = m->block_indptr + blocks + s;
        for (int64_t tile = 0; tile <= m->tiles; tile++)
            if (tile_ptr[tile] < (tile ? tile_ptr[tile - 1] : 0) || (tile == 0 && tile_ptr[0]) ||
                (tile == m->tiles && tile_ptr[tile] != num))
                return fault_of(MACKO_EC_TILE_PTR, s, tile, tile_ptr[tile]);
        for (int64_t block = 0; block <= num; block++)
            if (indptr[block] % (MACKO_EC_WARP * v) || (block == 0 ? indptr[0] : indptr[block] <= indptr[block - 1]))
                return fault_of(MACKO_EC_INDPTR, s, block, indptr[block]);
        blocks += num;
        rows += num * (MACKO_EC_WARP / l) * h;
        values += indptr[num] * h;
        deltas += indptr[num] * set->delta_bits / 8;
        if (rows > m->num_rows || values > m->num_values || deltas > num_delta_bytes)
            return fault_of(MACKO_EC_INDPTR, s, num, indptr[num]);
    }
    if (blocks != m->num_blocks || rows != m->num_rows || values != m->num_values || deltas != num_delta_bytes)
        return fault_of(MACKO_EC_SET, m->num_sets, -1, blocks);
    return fault_of(MACKO_EC_OK, 0, -1, 0);
}

static macko_fault check_rows(const macko_ec_matrix *m, int64_t s) {
    const macko_ec_set *set = &m->sets[s];
    const int64_t rows_a_block = MACKO_EC_WARP / set->lanes * set->height;
    int64_t distinct = 0;
    for (int64_t tile = 0; tile < m->tiles; tile++) {
        const int32_t *tile_ptr = m->tile_ptr + s * (m->tiles + 1) + tile;
        const int64_t first = tile * m->tile_rows, num_rows = least(m->tile_rows, m->rows - first);
        uint8_t seen[MACKO_EC_MAX_TILE] = {0};
        for (int64_t block = tile_ptr[0]; block < tile_ptr[1]; block++) {
            const int32_t *rows = m->row_indices + set->first_row + block * rows_a_block;
            for (int64_t k = 0; k < rows_a_block; k++) {
                const int64_t row = rows[k] - first;
                if (rows[k] == -1 && set->lanes < MACKO_EC_WARP) continue;
                if (row < 0 || row >= num_rows || seen[row])
                    return fault_of(MACKO_EC_ROW, s, rows + k - m->row_indices, rows[k]);
                seen[row] = 1;
                distinct++;
            }
            /* With all lanes on one piece a row may come again in another block. */
            for (int64_t k = 0; set->lanes == MACKO_EC_WARP && k < rows_a_block; k++) seen[rows[k] - first] = 0;
        }
    }
    if (set->lanes < MACKO_EC_WARP && distinct != m->rows) return fault_of(MACKO_EC_ROW, s, set[1].first_row, -1);
    return fault_of(MACKO_EC_OK, 0, -1, 0);
}

static macko_fault check_first_deltas(const macko_ec_matrix *m, int64_t s) {
    const macko_ec_set *set = &m->sets[s];
    const int32_t *indptr = m->block_indptr + set->first_block + s;
    for (int64_t block = 0; block < set[1].first_block - set->first_block; block++)
        for (int lane = 0; lane < MACKO_EC_WARP; lane++) {
            const int64_t bit = (indptr[block] + lane * set->vector) * set->delta_bits;
            for (int64_t i = bit; i < bit + set->delta_bits; i++)
                if (m->delta_indices[set->first_delta + (i >> 3)] >> (i & 7) & 1)
                    return fault_of(MACKO_EC_DELTA, s, indptr[block] + lane * set->vector, 1);
        }
    return fault_of(MACKO_EC_OK, 0, -1, 0);
}

static macko_fault check_col_order(const macko_ec_matrix *m) {
    macko_fault fault = fault_of(MACKO_EC_OK, 0, -1, 0);
    if (!m->col_order) return fault;
    uint8_t *seen = calloc((size_t)m->cols / 8 + 1, 1);
    if (!seen) return fault_of(MACKO_EC_NO_MEMORY, 0, -1, 0);
    for (int64_t c = 0; !fault.kind && c < m->cols; c++) {
        const int64_t col = macko_ec_column(m->col_order, m->cols, c);
        if (col >= m->cols || seen[col >> 3] >> (col & 7) & 1)
            fault = fault_of(MACKO_EC_COL_ORDER, 0, c, col);
        else
            seen[col >> 3] |= (uint8_t)(1 << (col & 7));
    }
    free(seen);
    return fault;
}

/* The values of a tile: their columns, and that none stands twice; its rows have been looked at. */
static macko_fault check_values(const macko_ec_matrix *m, int64_t tile) {
    int64_t values = 0;
    for (int64_t s = 0; s < m->num_sets; s++) {
        const int32_t *tile_ptr = m->tile_ptr + s * (m->tiles + 1) + tile;
        const int32_t *indptr = m->block_indptr + m->sets[s].first_block + s;
        values += ((int64_t)indptr[tile_ptr[1]] - indptr[tile_ptr[0]]) * m->sets[s].height;
    }
    if (!values) return fault_of(MACKO_EC_OK, 0, -1, 0);
    const int64_t bitmap_bytes = m->tile_rows * m->cols / 8 + 1, list_bytes = values * (int64_t)sizeof(value_place);
    const int few = bitmap_bytes > list_bytes; /* under one in 128: then sorting them takes no time either */
    void *scratch = few ? malloc((size_t)list_bytes) : calloc((size_t)bitmap_bytes, 1);
    if (!scratch) return fault_of(MACKO_EC_NO_MEMORY, 0, -1, 0);
    checking check = {.first_row = tile * m->tile_rows, .seen = few ? NULL : scratch, .places = scratch};
    for (int64_t s = 0; !check.fault.kind && s < m->num_sets; s++) {
        const int32_t *tile_ptr = m->tile_ptr + s * (m->tiles + 1) + tile;
        check.set = s;
        for (int64_t block = tile_ptr[0]; block < tile_ptr[1]; block++)
            if (!each_value(m, &m->sets[s], s, block, look, &check)) break;
    }
    if (few && !check.fault.kind) {
        const value_place *places = scratch;
        qsort(scratch, (size_t)check.num_places, sizeof *places, by_place);
        for (int64_t i = 1; i < check.num_places; i++) {
            if (places[i].place != places[i - 1].place) continue;
            int64_t s = 0;
            while (m->sets[s + 1].first_value <= places[i].index) s++;
            check.fault = fault_of(MACKO_EC_TWICE, s, places[i].index, places[i].place % m->cols);
            break;
        }
    }
    free(scratch);
    return check.fault.kind ? check.fault : fault_of(MACKO_EC_OK, 0, -1, 0);
}

macko_fault macko_ec_check_cpu(const macko_ec_matrix *m, int64_t num_delta_bytes) {
    macko_fault fault = check_structure(m, num_delta_bytes);
    if (!fault.kind) fault = check_col_order(m);
    for (int64_t s = 0; !fault.kind && s < m->num_sets; s++) fault = check_rows(m, s);
    for (int64_t s = 0; !fault.kind && s < m->num_sets; s++) fault = check_first_deltas(m, s);
    for (int64_t tile = 0; !fault.kind && m->num_sets && tile < m->tiles; tile++) fault = check_values(m, tile);
    return fault;
}
