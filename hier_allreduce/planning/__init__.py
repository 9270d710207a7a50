"""From gradients to a plan: whole numbers only. No TensorFlow.

::

    rule │ name │ function ──► Plan: schedules and a chunk size         strategy, algorithms
                                   │ chunk c takes schedule c mod S
    GradientSize × N ──chunks_of──► Chunk × C ──scheduled──► Chunk × C       chunks, schedules
                                                with moves ──► run(schedule, chunk, …)       plan

``Strategy`` holds a user's choices; ``check`` counts the towers in each sum. Each name is imported
from its module.
"""
