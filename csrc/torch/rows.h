// Loops over the rows of a packed matrix on torch's CPU threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

#include "tensors.h"

namespace macko {

// body(begin, end) for rows [begin, end), about `entries_per_row` of work each.
template <typename Body>
void for_rows(int64_t rows, int64_t entries_per_row, const Body &body) {
    constexpr int64_t GRAIN_ENTRIES = 1 << 15; // some 10 us of work: below, a thread costs more than it brings
    torch::stable::parallel_for(0, rows, std::max<int64_t>(1, GRAIN_ENTRIES / std::max<int64_t>(1, entries_per_row)),
                                body);
}

// body(begin, end) for parts of [0, count) of `grain` or more, which returns -1 where its scratch memory could not be had.
template <typename Body>
void in_parallel(const char *op, int64_t count, int64_t grain, const Body &body) {
    std::atomic<bool> failed{false};
    torch::stable::parallel_for(0, count, std::max<int64_t>(1, grain), [&](int64_t begin, int64_t end) {
        if (body(begin, end)) failed = true;
    });
    if (failed) fail(op, "out of memory");
}

// As for_rows, for a body that returns a fault: the one of the lowest row, for one row the kind that is looked for first.
template <typename Body>
macko_fault first_fault(int64_t rows, int64_t entries_per_row, const Body &body) {
    std::mutex mutex;
    macko_fault first{};
    for_rows(rows, entries_per_row, [&](int64_t begin, int64_t end) {
        const macko_fault fault = body(begin, end);
        if (fault.kind) {
            const std::lock_guard<std::mutex> lock(mutex);
            if (!first.kind || fault.row < first.row || (fault.row == first.row && fault.kind < first.kind))
                first = fault;
        }
    });
    return first;
}

// Entries of each row -> row_ptr; the total, or an error where that is more than `most`.
inline int64_t sum_counts(const char *op, const std::vector<int64_t> &counts, int64_t most, int32_t *row_ptr) {
    int64_t stored = 0;
    for (const int64_t count : counts) stored += count;
    if (stored > most) fail(op, "the matrix has ", stored, " entries to store, row_ptr is int32: at most ", most);
    row_ptr[0] = 0;
    for (size_t row = 0; row < counts.size(); row++) row_ptr[row + 1] = row_ptr[row] + int32_t(counts[row]);
    return stored;
}

inline void clear_from(Tensor &values, int64_t entry) {
    auto *data = writes<char>(values);
    std::fill(data + entry * values.element_size(), data + values.numel() * values.element_size(), 0);
}

// y [tokens, rows] = x [tokens, cols] W^T + bias by torch's dense product, over blocks of rows that fill(begin, end, w)
// writes densely to w, or returns a fault. A block's memory is used again while the cache has it; a whole dense copy would
// cost a page fault every 4 KiB, at each call.
template <typename Fill>
macko_fault linear_by_blocks(const Tensor &x, int64_t rows, const std::optional<Tensor> &bias, Tensor &y,
                             const Fill &fill) {
    constexpr int64_t BLOCK_BYTES = 4 << 20; // 4096x4096 bf16, 64 tokens, one core of a Zen 5: 7.3 ms, whole 23.7
    const int64_t cols = x.size(1), row_bytes = std::max<int64_t>(1, cols * x.element_size());
    const int64_t block_rows = std::min(rows, std::max<int64_t>(64, BLOCK_BYTES / row_bytes));
    Tensor block = torch::stable::new_empty(x, {block_rows, cols});
    for (int64_t begin = 0; begin < rows; begin += block_rows) {
        const int64_t count = std::min(block_rows, rows - begin);
        const macko_fault fault = first_fault(count, cols, [&](int64_t from, int64_t to) {
            return fill(begin + from, begin + to, writes<char>(block) + from * cols * x.element_size());
        });
        if (fault.kind) return fault;
        Tensor to = torch::stable::narrow(y, 1, begin, count);
        torch::stable::copy_(
            to, dense_linear(x, torch::stable::narrow(block, 0, 0, count), narrowed_bias(bias, begin, count)));
    }
    return {};
}

} // namespace macko
