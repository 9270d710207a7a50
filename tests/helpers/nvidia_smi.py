"""Outputs of nvidia-smi."""


def table_of(count, kind):
    """Return an output of ``nvidia-smi topo -m`` in which all pairs are of one kind."""
    lines = ["\t" + "\t".join(f"GPU{gpu}" for gpu in range(count))]
    for gpu in range(count):
        cells = [kind] * count
        cells[gpu] = " X "
        lines.append("\t".join([f"GPU{gpu}", *cells]))
    return "\n".join(lines) + "\n"
