// From dense rows to slabs, for every codec. Besides what ops.h asks of a KIND:
//
//     histogram, HIGHS  where values have codes: counts elements by the high byte that the table may have, one of HIGHS
//     count             where slabs have sizes that content decides: their units, and totals
//     refuse            where content may not fit: an error of the totals
//     slab_units        where all slabs are of one size: which
#pragma once

#include <algorithm>
#include <array>
#include <mutex>
#include <vector>

#include "../macko/ops.h"
#include "ops.h"

namespace macko {

// data and offsets [slabs + 1] of a matrix in slabs of so many units, once they have passed every check that needs no look at
// their content; check_type says which types of values there are.
template <typename CheckType>
macko_dtype check_slabs(const char *op, const Packed &p, int fewest, int most, const CheckType &check_type) {
    const Tensor &data = p[0], &offsets = p[1];
    const Wanted all[] = {{"data", data, ScalarType::Undefined, 1, 16}, {"offsets", offsets, ScalarType::Int, 1}};
    check_kinds(op, all);
    const macko_dtype dtype = check_type(op, "data", data);
    check_sizes(op, p);
    const int64_t slabs = macko_slab_count(p.rows(), p.cols()), widest = p.number(0);
    if (offsets.numel() != slabs + 1)
        fail(op, "offsets has ", offsets.numel(), " elements, expected ", slabs + 1, " for a matrix of ", p.rows(),
             " x ", p.cols());
    if (data.numel() * 2 % MACKO_SLAB_UNIT || data.numel() * 2 < slabs * fewest * MACKO_SLAB_UNIT)
        fail(op, "data has ", data.numel(), " elements, expected a multiple of ", MACKO_SLAB_UNIT / 2, ", at least ",
             slabs * fewest * MACKO_SLAB_UNIT / 2);
    const int least = slabs ? fewest : 0, largest = slabs ? most : 0;
    if (widest < least || widest > largest) fail(op, "widest is ", widest, ", expected ", least, " to ", largest);
    check_memory(op, all);
    return dtype;
}

// Of a codec whose table is of a bfloat16's bits.
inline macko_dtype check_bfloat16(const char *op, const char *name, const Tensor &t, const char *codec) {
    if (t.scalar_type() == ScalarType::BFloat16) return MACKO_BF16;
    if (t.scalar_type() != ScalarType::Half)
        fail(op, name, " has dtype ", dtype_name(t.scalar_type()), ", ", codec, " holds bfloat16 and float16");
    return MACKO_F16;
}

// The table's halves in a header, each at most `most`.
inline void check_table(const char *op, const Packed &p, int64_t most) {
    for (const int word : {1, 2})
        if (p.number(word) < 0 || p.number(word) > most)
            fail(op, word == 1 ? "table_low is " : "table_high is ", p.number(word), ", expected 0 to ", most);
}

// A dense matrix that is packed.
inline void check_extents(const char *op, const Tensor &w) {
    check_dim(op, "w", w, 2);
    for (const int64_t size : {w.size(0), w.size(1)})
        if (size > INT32_LIMIT)
            fail(op, "w has shape ", shape_name(w), ", expected at most ", INT32_LIMIT, " rows and columns");
}

#ifdef USE_CUDA
template <typename Function, typename... Arguments>
void run(const Tensor &like, Function function, Arguments... arguments) {
    STD_CUDA_CHECK(function(arguments..., current_stream(like)));
}

// Dense rows of a canonical matrix, as many as the workspace holds; where that is all of them, they stay. for_each of these
// structs calls body(first row, rows, dense rows), piece after piece; a piece begins with a row block.
struct CanonicalRows {
    const macko_matrix &source;
    const Tensor &like;
    const int64_t step;
    Tensor dense;
    bool unpacked = false; // all rows, and they stay

    CanonicalRows(const macko_matrix &source, const Tensor &values)
        : source(source), like(values), step(step_of(source)),
          dense(torch::stable::new_empty(values, {std::min(source.rows, step), source.cols})) {
    }
    static int64_t step_of(const macko_matrix &m) {
        const int64_t most = rows_of_panel(m.rows, m.cols, 2);
        return most >= m.rows ? m.rows : (most + MACKO_SLAB_ROWS - 1) / MACKO_SLAB_ROWS * MACKO_SLAB_ROWS;
    }
    template <typename Body>
    void for_each(const Body &body) {
        for (int64_t first = 0; first < source.rows; first += step) {
            macko_matrix piece = source;
            piece.row_ptr += first;
            piece.rows = std::min(step, source.rows - first);
            if (!unpacked) run(like, macko_unpack_cuda, &piece, dense.mutable_data_ptr());
            body(first, piece.rows, reads<uint16_t>(dense));
        }
        unpacked = step >= source.rows;
    }
};

// The rows of w [rows, cols].
template <typename Element>
struct TensorRows {
    const Tensor &like;

    template <typename Body>
    void for_each(const Body &body) {
        if (like.size(0)) body(int64_t(0), like.size(0), reads<Element>(like));
    }
};

// Numbers that kernels add to, from zeros on.
template <typename T>
struct Sums {
    Tensor there;

    explicit Sums(const Tensor &like)
        : there(torch::stable::new_zeros(like, {int64_t(sizeof(T) / 8)}, ScalarType::Long)) {
    }
    template <typename Add>
    void add(const Add &add) {
        add(writes<T>(there));
    }
    T get() const { // waits: the host makes the table, and allocates, by them
        return read_back<T>(there);
    }
};
#else
template <typename Function, typename... Arguments>
void run(const Tensor &, Function function, Arguments... arguments) {
    function(arguments...);
}

// Dense rows of a canonical matrix, a row block at a time, which threads share out. for_each of these structs calls
// body(first row, rows, dense rows); what is given begins with a row block.
struct CanonicalRows {
    const macko_matrix &source;
    const Tensor &like;

    template <typename Body>
    void for_each(const Body &body) {
        const int64_t rows = source.rows, cols = source.cols;
        for_rows(macko_slab_row_blocks(rows), cols * MACKO_SLAB_ROWS, [&](int64_t begin, int64_t end) {
            std::vector<uint16_t> dense(MACKO_SLAB_ROWS * cols);
            for (int64_t first = begin * MACKO_SLAB_ROWS; first < std::min(rows, end * MACKO_SLAB_ROWS);
                 first += MACKO_SLAB_ROWS) {
                const int64_t count = std::min<int64_t>(MACKO_SLAB_ROWS, rows - first);
                macko_unpack_cpu(&source, first, first + count, dense.data());
                body(first, count, dense.data());
            }
        });
    }
};

// The rows of w [rows, cols].
template <typename Element>
struct TensorRows {
    const Tensor &like;

    template <typename Body>
    void for_each(const Body &body) {
        const int64_t rows = like.size(0), cols = like.size(1);
        for_rows(macko_slab_row_blocks(rows), cols * MACKO_SLAB_ROWS, [&](int64_t begin, int64_t end) {
            const int64_t first = begin * MACKO_SLAB_ROWS;
            body(first, std::min(rows, end * MACKO_SLAB_ROWS) - first, reads<Element>(like) + first * cols);
        });
    }
};

inline void add_to(macko_slab_totals &sums, const macko_slab_totals &more) {
    sums.stored += more.stored;
    sums.listed += more.listed;
    sums.fullest = std::max(sums.fullest, more.fullest);
}
template <size_t N>
void add_to(std::array<int64_t, N> &sums, const std::array<int64_t, N> &more) {
    for (size_t i = 0; i < N; i++) sums[i] += more[i];
}

// Numbers that threads add to, from zeros on.
template <typename T>
struct Sums {
    T here{};
    std::mutex mutex;

    explicit Sums(const Tensor &) {
    }
    template <typename Add>
    void add(const Add &add) {
        T more{};
        add(&more);
        const std::lock_guard<std::mutex> lock(mutex);
        add_to(here, more);
    }
    T get() const {
        return here;
    }
};
#endif

inline void check_units(const char *op, int64_t units) {
    if (units > INT32_MAX)
        fail(op, "the layout takes ", units, " units of ", MACKO_SLAB_UNIT, " bytes, expected at most ", INT32_MAX);
}

// Units of slabs in offsets[1 .. slabs] become their sums, and the totals say what they are together.
inline void add_up_slabs([[maybe_unused]] const char *op, int64_t slabs, int32_t *offsets,
                         Sums<macko_slab_totals> &sums) {
#ifdef USE_CUDA
    run(sums.there, macko_slab_scan_cuda, slabs, offsets, writes<macko_slab_totals>(sums.there));
#else
    macko_slab_totals &totals = sums.here;
    offsets[0] = 0;
    for (int64_t slab = 0; slab < slabs; slab++) {
        totals.widest = std::max<int64_t>(totals.widest, offsets[slab + 1]);
        totals.units += offsets[slab + 1];
        check_units(op, totals.units);
        offsets[slab + 1] = int32_t(totals.units);
    }
#endif
}

// The matrix's rows from a row block's first one on: the offsets of its slabs are those of the whole one.
template <typename Matrix>
Matrix piece_of(Matrix m, int64_t first, int64_t rows) {
    if constexpr (requires { m.offsets; }) m.offsets += first / MACKO_SLAB_ROWS * macko_slabs_across(m.cols);
    m.rows = rows;
    return m;
}

// What packing makes.
struct Slabs {
    Tensor data, offsets; // offsets: where slabs have sizes
    macko_slab_totals totals{};
};

// Of m rows, cols and the types are given; the table, offsets, sizes and data become known.
template <typename Kind, typename Rows>
Slabs pack_slabs(const char *op, typename Kind::Matrix &m, Rows rows) {
    using Element = typename Kind::Element;
    constexpr bool SIZED = requires { m.offsets; };
    const Tensor &like = rows.like;
    const int64_t slabs = macko_slab_count(m.rows, m.cols), across = macko_slabs_across(m.cols);
    Slabs made;
    int32_t *offsets = nullptr;
    if constexpr (SIZED) {
        made.offsets = torch::stable::new_empty(like, {slabs + 1}, ScalarType::Int);
        m.offsets = offsets = writes<int32_t>(made.offsets);
    }
    if constexpr (requires { Kind::histogram; }) {
        Sums<std::array<int64_t, Kind::HIGHS>> counts(like);
        rows.for_each([&](int64_t first, int64_t count, const Element *w) {
            const auto piece = piece_of(m, first, count);
            counts.add([&](auto *sums) { run(like, Kind::histogram, &piece, w, (int64_t *)sums); });
        });
        macko_slab_table(counts.get().data(), Kind::HIGHS, m.table);
    }
    if constexpr (requires { Kind::count; }) {
        Sums<macko_slab_totals> totals(like);
        rows.for_each([&](int64_t first, int64_t count, const Element *w) {
            const auto piece = piece_of(m, first, count);
            totals.add([&](macko_slab_totals *sums) {
                run(like, Kind::count, &piece, w, SIZED ? offsets + first / MACKO_SLAB_ROWS * across : nullptr, sums);
            });
        });
        if (SIZED) add_up_slabs(op, slabs, offsets, totals);
        made.totals = totals.get();
    }
    if constexpr (requires { Kind::refuse; }) Kind::refuse(op, m, made.totals);
    int64_t slab_bytes = 0; // of every one
    if constexpr (SIZED) {
        check_units(op, made.totals.units);
        m.widest = int32_t(made.totals.widest);
        m.units = made.totals.units;
    } else {
        const int units = slabs ? Kind::slab_units(made.totals) : 0;
        if constexpr (requires { m.slab_units; }) m.slab_units = units;
        slab_bytes = units * MACKO_SLAB_UNIT;
    }
    made.data = torch::stable::new_empty(like, {(SIZED ? made.totals.units * MACKO_SLAB_UNIT : slabs * slab_bytes) / 2},
                                         m.dtype == MACKO_F16 ? ScalarType::Half : ScalarType::BFloat16);
    auto *bytes = writes<uint8_t>(made.data);
    rows.for_each([&](int64_t first, int64_t count, const Element *w) {
        const auto piece = piece_of(m, first, count);
        run(like, Kind::write, &piece, w, bytes + first / MACKO_SLAB_ROWS * across * slab_bytes);
    });
#ifdef USE_CUDA
    // A product may read the weight before the kernel before it has ended (PDL): that must not be the one that writes it.
    torch::stable::new_zeros(like, {1}, ScalarType::Long);
#endif
    return made;
}

// Of a canonical matrix; of m the types.
template <typename Kind>
Slabs lay_out_slabs(const Packed &canonical, typename Kind::Matrix &m) {
    const char *op = "lay_out";
    const macko_matrix source = checked_matrix(op, canonical);
    const Tensor &values = canonical[0];
    m.dtype = Kind::check_type(op, "values", values);
    const DeviceOf guard(values);
    check_content(op, source, values);
    m.rows = source.rows;
    m.cols = source.cols;
    return pack_slabs<Kind>(op, m, CanonicalRows(source, values));
}

} // namespace macko
