// Who multiplies which slabs for up to 64 tokens (few_kernel.cuh), and who adds up which sums: C++ for host and device, tested
// on the host.
#pragma once

#include <algorithm>

#include "slab.h"

#ifdef __CUDACC__
#define MACKO_FEW_FN __host__ __device__ __forceinline__
#else
#define MACKO_FEW_FN inline
#endif

namespace macko {
namespace {

#ifndef __CUDACC__
using std::max;
using std::min;
#endif

constexpr int MACKO_FEW_WARPGROUP = 128; // threads, each with sums of its own

// Who has what of a cluster's row blocks.
struct few_partition {
    int whole;         // row blocks of a block
    int share, longer; // slabs of a share; the first `longer` shares have one more
};

// What a block does, in this order: whole row blocks, then its share of the cluster's other ones.
struct few_work {
    int first_row_block, whole; // whole ones
    int left;                   // the first row block of the shares
    int start, end;             // of the block's share: slabs from that row block's first one on

    template <typename TASK>
    MACKO_FEW_FN few_work(const TASK &task, int cluster, int rank) {
        const bool fewer = cluster >= task.more;
        const few_partition &mine = task.partition[fewer];
        const int begin = cluster * task.each + min(cluster, (int)task.more);
        whole = mine.whole;
        first_row_block = begin + rank * whole;
        left = begin + task.cluster * whole;
        start = share_at(mine, rank);
        end = share_at(mine, rank + 1);
    }
    MACKO_FEW_FN static int share_at(const few_partition &mine, int rank) {
        return rank * mine.share + min(rank, mine.longer);
    }
};

// The first slab of a block, from what the first fetch needs.
template <typename TASK>
MACKO_FEW_FN int few_first_slab(const TASK &task, int cluster, int rank) {
    const bool fewer = cluster >= task.more;
    return (cluster * task.each + min(cluster, (int)task.more)) * task.slabs +
           rank * (fewer ? task.advance[1] : task.advance[0]) +
           min(rank, (int)(fewer ? task.longer[1] : task.longer[0]));
}

// Who has a share of a split row block: the blocks of ranks [first, first + ways). Each adds up the sums of a chunk of
// threads, and receives them from the others.
struct few_split {
    int first, ways, chunk_bits;

    few_split() = default;
    // nth: of the row blocks that the cluster shares.
    MACKO_FEW_FN few_split(const few_partition &mine, int blocks, int nth, int slabs) {
        first = 0;
        while (first + 1 < blocks && few_work::share_at(mine, first + 1) <= nth * slabs) first++;
        int last = first;
        while (last + 1 < blocks && few_work::share_at(mine, last + 1) < (nth + 1) * slabs) last++;
        ways = last - first + 1;
        chunk_bits = 7;
        while (chunk_bits && (ways << (chunk_bits - 1)) >= MACKO_FEW_WARPGROUP) chunk_bits--;
    }
};

// How clusters of so many blocks share a matrix.
struct few_shares {
    int each, more; // row blocks of a cluster; clusters that have one more
    // In the clusters that have one more, and in the others:
    few_partition partition[2];
    int advance[2], longer[2];                          // as few_first_slab takes them
    int stages[2];                                      // of a block, at most
    bool split = false, crosses = false, halves = true; // row blocks; in two some shares; all splits are in two
    // In stages of a block while all SMs are at work. Adding up takes half of one; one more if split, and if shares cross.
    double time;

    few_shares(int row_blocks, int clusters, int blocks, int slabs, int sms)
        : each(row_blocks / clusters), more(row_blocks % clusters) {
        for (int i = 0; i < 2; i++) {
            const int count = each + (i == 0 && more), left = count % blocks, slabs_left = left * slabs;
            few_partition &p = partition[i] = {count / blocks, slabs_left / blocks, slabs_left % blocks};
            advance[i] = p.whole ? p.whole * slabs : p.share;
            longer[i] = p.whole ? 0 : p.longer;
            stages[i] = p.whole * slabs + p.share + (p.longer > 0);
            if (!left) continue;
            const bool even = left == 1 || (blocks % left == 0 && slabs_left % blocks == 0);
            split = true;
            crosses |= !even;
            halves &= even && blocks == 2 * left;
        }
        // Memory is shared by the blocks that are at work, until these are so few that they decode no faster.
        const auto rate = [&](int busy) { return std::max(0.75, (double)busy * blocks / sms); };
        time = stages[1] * rate(clusters) + (stages[0] - stages[1]) * rate(more) + partition[0].whole * 0.5 + split +
               crosses;
    }
};

} // namespace
} // namespace macko
