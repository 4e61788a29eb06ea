"""The textbook rules of distributed products, moved block by block: an oracle that shares nothing with ``cost()``.

Ranks are coordinates, memory is a dict of NumPy blocks, and ``Counter.move`` is the only way from one rank to another;
it counts. Each function computes C, dA and dB of whole matrices on a grid and gives them with the counts, by pass.
"""

import itertools
from collections import defaultdict

import numpy as np


class Counter:
    """Deliveries and elements by (pass, axis); axis is the one in which two coordinates differ."""

    def __init__(self):
        self.deliveries, self.elements = defaultdict(int), defaultdict(int)
        self.phase = "forward"

    def move(self, block, source, target):
        if source == target:
            return block
        (axis,) = [name for name, a, b in zip("xyz", source, target, strict=True) if a != b]
        self.deliveries[self.phase, axis] += 1
        self.elements[self.phase, axis] += block.size
        return block

    def result(self):
        return {key: (self.deliveries[key], self.elements[key]) for key in self.deliveries}


def cut(matrix, rows, columns):
    """Blocks by (i, j), borders as torch.chunk's: ceil, the last ones short or empty."""

    def borders(size, parts):
        step = -(-size // parts)
        return [min(size, i * step) for i in range(parts + 1)]

    r, c = borders(matrix.shape[0], rows), borders(matrix.shape[1], columns)
    return {(i, j): matrix[r[i] : r[i + 1], c[j] : c[j + 1]] for i in range(rows) for j in range(columns)}


def join(blocks, rows, columns):
    return np.block([[blocks[i, j] for j in range(columns)] for i in range(rows)])


def cannon(a, b, grad, q, d=1):
    """Cannon's rings; with d > 1 the 2.5D algorithm: copies, a share of the steps each, a sum at the end."""
    count = Counter()
    a0, b0, g0 = cut(a, q, q), cut(b, q, q), cut(grad, q, q)
    steps = -(-q // d)
    shares = [range(min(q, layer * steps), min(q, (layer + 1) * steps)) for layer in range(d)]
    places = list(itertools.product(range(q), range(q)))

    def copies(blocks, layer):
        return {(i, j): count.move(blocks[i, j], (i, j, 0), (i, j, layer)) for i, j in places}

    def shift_y(held, back_of, layer):
        """Each block goes ``back_of(i)`` places back along y."""
        return {
            (i, (j - back_of(i)) % q): count.move(held[i, j], (i, j, layer), (i, (j - back_of(i)) % q, layer))
            for i, j in places
        }

    def shift_x(held, back_of, layer):
        return {
            ((i - back_of(j)) % q, j): count.move(held[i, j], (i, j, layer), ((i - back_of(j)) % q, j, layer))
            for i, j in places
        }

    def to_layer_0(layers):
        total = {}
        for layer, blocks in enumerate(layers):
            for (i, j), block in blocks.items():
                block = count.move(block, (i, j, layer), (i, j, 0))
                total[i, j] = total[i, j] + block if (i, j) in total else block
        return total

    results = []
    for layer, share in enumerate(shares):
        la, lb = copies(a0, layer), copies(b0, layer)
        c = {(i, j): np.zeros((a0[i, 0].shape[0], b0[0, j].shape[1])) for i, j in places}
        for step in share:
            if step == share[0]:
                la, lb = shift_y(la, lambda i, s=step: i + s, layer), shift_x(lb, lambda j, s=step: j + s, layer)
            else:
                la, lb = shift_y(la, lambda i: 1, layer), shift_x(lb, lambda j: 1, layer)
            for i, j in places:
                c[i, j] = c[i, j] + la[i, j] @ lb[i, j]
        results.append(c)
    c = to_layer_0(results)

    count.phase = "backward"
    sums_a, sums_b = [], []
    for layer, share in enumerate(shares):
        la, lb, lg = copies(a0, layer), copies(b0, layer), copies(g0, layer)
        da = {(i, j): np.zeros_like(a0[i, (i + j + (share[0] if share else -i)) % q]) for i, j in places}
        db = {(i, j): np.zeros_like(b0[(i + j + (share[0] if share else -j)) % q, j]) for i, j in places}
        for step in share:
            if step == share[0]:
                la, lb = shift_y(la, lambda i, s=step: i + s, layer), shift_x(lb, lambda j, s=step: j + s, layer)
            else:
                la, lb = shift_y(la, lambda i: 1, layer), shift_x(lb, lambda j: 1, layer)
                da, db = shift_y(da, lambda i: 1, layer), shift_x(db, lambda j: 1, layer)
            for i, j in places:
                da[i, j] = da[i, j] + lg[i, j] @ lb[i, j].T
                db[i, j] = db[i, j] + la[i, j].T @ lg[i, j]
        if share:  # the sums go home: that of column s to y = s
            da = shift_y(da, lambda i, s=share[-1]: -(i + s), layer)
            db = shift_x(db, lambda j, s=share[-1]: -(j + s), layer)
        sums_a.append(da)
        sums_b.append(db)
    return join(c, q, q), join(to_layer_0(sums_a), q, q), join(to_layer_0(sums_b), q, q), count.result()


def tesseract(a, b, grad, q, d=1):
    """Layers of SUMMA with their own rows; d = 1 is SUMMA."""
    count = Counter()
    a0, b0, g0 = cut(a, q * d, q), cut(b, q, q), cut(grad, q * d, q)
    c, da, layer_db = {}, {}, []
    for k in range(d):
        row = {i: i + k * q for i in range(q)}
        for i, j in itertools.product(range(q), range(q)):
            total = 0
            for t in range(q):
                left = count.move(a0[row[i], t], (i, t, k), (i, j, k))
                right = count.move(b0[t, j], (t, j, k), (i, j, k))
                total = total + left @ right
            c[row[i], j] = total
    count.phase = "backward"
    for k in range(d):
        row = {i: i + k * q for i in range(q)}
        db = {}
        for i, t in itertools.product(range(q), range(q)):
            total = 0
            for j in range(q):
                right = count.move(b0[t, j], (t, j, k), (i, j, k))
                total = total + count.move(g0[row[i], j] @ right.T, (i, j, k), (i, t, k))
            da[row[i], t] = total
        for t, j in itertools.product(range(q), range(q)):
            total = 0
            for i in range(q):
                left = count.move(a0[row[i], t], (i, t, k), (i, j, k))
                total = total + count.move(left.T @ g0[row[i], j], (i, j, k), (t, j, k))
            db[t, j] = total
        layer_db.append(db)
    summed = {}
    for t, j in itertools.product(range(q), range(q)):  # to layer 0 and back
        summed[t, j] = sum(count.move(layer_db[k][t, j], (t, j, k), (t, j, 0)) for k in range(d))
        for k in range(d):
            count.move(summed[t, j], (t, j, 0), (t, j, k))
    return join(c, q * d, q), join(da, q * d, q), join(summed, q, q), count.result()


def gathered(a, b, grad, x, y, z, *, whole_activations):
    """Agarwal's 3D algorithm; with ``whole_activations`` AxoNN's, which gathers weights only and sums activations."""
    count = Counter()
    ab, bb, gb = cut(a, z, y), cut(b, y, x), cut(grad, z, x)
    ranks = list(itertools.product(range(x), range(y), range(z)))

    def spread(block, along, parts, home, transposed=False):
        """All-gather: every shard to every other rank of the line."""
        block = block.T if transposed else block
        shards = [block[s] for s in _borders(block.shape[0], parts)]
        for target in range(parts):
            for source in range(parts):
                count.move(shards[source], _at(home, along, source), _at(home, along, target))

    def scatter(block, along, parts, home, transposed=False):
        """Reduce-scatter: from every rank, the part of every other."""
        block = block.T if transposed else block
        shards = [block[s] for s in _borders(block.shape[0], parts)]
        for target in range(parts):
            for source in range(parts):
                count.move(shards[target], _at(home, along, source), _at(home, along, target))

    def all_reduce(block, along, parts, home):
        for other in range(parts):
            count.move(block, _at(home, along, other), _at(home, along, 0))
            count.move(block, _at(home, along, 0), _at(home, along, other))

    for i, j, k in ranks:
        if not whole_activations and i == 0:
            spread(ab[k, j], 0, x, (i, j, k))
        if k == 0:
            spread(bb[j, i], 2, z, (i, j, k), whole_activations)
        if j == 0:
            (all_reduce if whole_activations else scatter)(gb[k, i], 1, y, (i, j, k))
    count.phase = "backward"
    for i, j, k in ranks:
        if k == 0:
            spread(bb[j, i], 2, z, (i, j, k), whole_activations)
            scatter(bb[j, i], 2, z, (i, j, k), whole_activations)
        if i == 0:
            if not whole_activations:
                spread(ab[k, j], 0, x, (i, j, k))
            (all_reduce if whole_activations else scatter)(ab[k, j], 0, x, (i, j, k))
        if j == 0 and not whole_activations:
            spread(gb[k, i], 1, y, (i, j, k))
    c = join({(k, i): sum(ab[k, j] @ bb[j, i] for j in range(y)) for i in range(x) for k in range(z)}, z, x)
    da = join({(k, j): sum(gb[k, i] @ bb[j, i].T for i in range(x)) for j in range(y) for k in range(z)}, z, y)
    db = join({(j, i): sum(ab[k, j].T @ gb[k, i] for k in range(z)) for i in range(x) for j in range(y)}, y, x)
    return c, da, db, count.result()


def megatron(a, b, grad, p, *, by_rows):
    """One all-reduce: of C when the weight is cut by rows, of dA when by columns."""
    count = Counter()
    count.phase = "forward" if by_rows else "backward"
    for other in range(p):
        summed = grad if by_rows else a
        count.move(summed, (other, 0, 0), (0, 0, 0))
        count.move(summed, (0, 0, 0), (other, 0, 0))
    return a @ b, grad @ b.T, a.T @ grad, count.result()


def _borders(size, parts):
    step = -(-size // parts)
    return [slice(min(size, i * step), min(size, (i + 1) * step)) for i in range(parts)]


def _at(home, axis, value):
    return tuple(value if index == axis else old for index, old in enumerate(home))
