/* slide_pack and slide_unpack on the CPU. */
#include "codes_cpu.h"
#include "windows.h"

/* Orders numbers as |value| does, Inf above them, NaN above Inf. */
static uint32_t magnitude(float value) {
    return macko_bits_from_f32(value) & 0x7fffffffu;
}

/* Zeroes the smallest of a group, of equals the last, until `allowed` non-zeros are left. */
static void prune_group(float *group, int width, int count, int allowed) {
    for (; count > allowed; count--) {
        int drop = -1;
        for (int i = 0; i < width; i++)
            if (group[i] != 0 && (drop < 0 || magnitude(group[i]) <= magnitude(group[drop]))) drop = i;
        group[drop] = 0;
    }
}

/* Looks for bad groups of a row, which is followed by zeros up to a whole group, and prunes them if asked. */
static void check_row(float *values, int64_t cols, int n, int prune, int64_t row, macko_slide_found *found) {
    const int allowed = 2 * n - 2;
    for (int64_t group = 0; n && group < macko_slide_groups(cols, n); group++) {
        float *start = values + group * 2 * n;
        int count = 0;
        for (int i = 0; i < 2 * n; i++) count += start[i] != 0;
        if (count <= allowed) continue;
        if (found->row < 0) found->row = row, found->group = group, found->count = count;
        if (!prune) continue;
        found->dropped += count - allowed;
        prune_group(start, 2 * n, count, allowed);
    }
}

int macko_slide_pack_cpu(const macko_slide_shape *shape, const void *w, macko_slide_source source, int prune,
                         int64_t begin, int64_t end, uint8_t *packed, float *scale, macko_slide_found *found) {
    const int64_t cols = shape->cols, k_tiles = macko_slide_k_tiles(cols, shape->n, shape->type);
    const int64_t width = cols + 2 * MACKO_SLIDE_MAX_N, tile_bytes = macko_slide_tile_bytes(shape->n, shape->type);
    const int keeps_bits = (source == MACKO_SLIDE_FROM_S8 || source == MACKO_SLIDE_FROM_E4M3 ||
                            macko_slide_element_bytes(shape->type) == 2);
    *found = (macko_slide_found){-1, -1, 0, 0};
    float *values = calloc((size_t)width, sizeof *values + sizeof(uint16_t));
    if (!values) return -1;
    uint16_t *codes = (uint16_t *)(values + width);
    const int64_t last = end == shape->rows ? macko_slide_row_blocks(end) * MACKO_SLIDE_BLOCK_ROWS : end;
    for (int64_t row = begin; row < last; row++) {
        if (row == shape->rows) memset(codes, 0, (size_t)width * sizeof *codes);
        if (row < shape->rows) {
            for (int64_t col = 0; col < cols; col++) values[col] = macko_slide_load(w, source, row * cols + col);
            check_row(values, cols, shape->n, prune, row, found);
            const macko_slide_quantiser by = macko_slide_quantiser_of(macko_slide_absmax(values, cols), shape->type);
            scale[row] = keeps_bits ? 1.0f : by.scale;
            for (int64_t col = 0; col < cols; col++) {
                const int64_t i = row * cols + col;
                if (values[col] == 0)
                    codes[col] = 0;
                else if (!keeps_bits)
                    codes[col] = macko_slide_quantise(values[col], by, shape->type);
                else
                    codes[col] = macko_slide_element_bytes(shape->type) == 2 ? ((const uint16_t *)w)[i]
                                                                             : ((const uint8_t *)w)[i];
            }
        }
        uint8_t *tiles = packed + row / MACKO_SLIDE_BLOCK_ROWS * k_tiles * tile_bytes;
        for (int64_t k_tile = 0; k_tile < k_tiles; k_tile++)
            macko_slide_fill_tile(codes, cols, shape->n, shape->type, (int)(row % MACKO_SLIDE_BLOCK_ROWS), k_tile,
                                  tiles + k_tile * tile_bytes);
    }
    free(values);
    return 0;
}

void macko_slide_unpack_cpu(const macko_slide_weight *weight, int64_t begin, int64_t end, void *codes) {
    const macko_slide_shape *shape = &weight->shape;
    const int64_t k_tiles = macko_slide_k_tiles(shape->cols, shape->n, shape->type);
    const int64_t tile_bytes = macko_slide_tile_bytes(shape->n, shape->type);
    const int64_t row_bytes = shape->cols * macko_slide_element_bytes(shape->type);
    for (int64_t row = begin; row < end; row++) {
        const uint8_t *tiles = weight->packed + row / MACKO_SLIDE_BLOCK_ROWS * k_tiles * tile_bytes;
        uint8_t *line = (uint8_t *)codes + row * row_bytes;
        memset(line, 0, (size_t)row_bytes);
        for (int64_t k_tile = 0; k_tile < k_tiles; k_tile++)
            macko_slide_read_tile(tiles + k_tile * tile_bytes, shape->cols, shape->n, shape->type,
                                  (int)(row % MACKO_SLIDE_BLOCK_ROWS), k_tile, line);
    }
}
