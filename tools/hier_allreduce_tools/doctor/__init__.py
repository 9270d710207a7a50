"""``hier-allreduce doctor``: facts of this machine, and problems with their remedies, in one list.

::

    packages, nvidia-smi, TensorFlow (probe) ─► machine ─► lines; one with a remedy begins with !
    nvidia-smi topo -m ─► topology ─► groups=…
    --copies ─► copies (copier) ─► bits, GB/s
"""
