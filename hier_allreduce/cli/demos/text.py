"""A small language model on the standard library's own English, its embedding gradients sparse from end to end.

The text is ``pydoc_data.topics``, what ``help()`` prints on keywords: half a megabyte in every Python. The model
guesses the next word from the four before it, by embeddings of words and of hashed pairs and triples of words.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import zlib
from collections import Counter
from pydoc_data.topics import topics
from typing import IO, Any, Dict, Iterator, List, NamedTuple, Tuple

import numpy as np
import tensorflow as tf
from tqdm import tqdm

from ...graph import executed_copies, tf1
from ...planning import Strategy
from ...training import TowerOptimizer
from .options import chosen_optimizer, chosen_strategy, named_devices
from .terminal import pause

EPOCHS = 2
OPTIMIZER = "adagrad"
RATE = 0.5
BATCH = 256  # words in a step, over all devices
CONTEXT = 4  # words that the model sees
WIDTH = 48  # of an embedding
HIDDEN = 96
HASHED = 1 << 15  # rows of the table for pairs and triples
BLOCK = 200  # words; every tenth block is kept for the test
COMPARED = 60  # steps that are also made on one device
DIFFERENCE = 1e-5  # at most, of a loss to training on one device
BETTER = 0.3  # times the unigram perplexity, at most


class Corpus(NamedTuple):
    """Words as numbers: ``features`` (N×6: four words, a hashed pair, a hashed triple), the ``word`` after them (N)."""

    features: np.ndarray
    word: np.ndarray


def load() -> Tuple[Corpus, Corpus, int]:
    """What to train on, what to test on, and the number of different words."""
    text = "\n".join(topics[name] for name in sorted(topics)).lower()
    words = re.findall(r"[a-z]+|[0-9]+|[^\sa-z0-9]", text)
    number = {word: n for n, (word, _) in enumerate(Counter(words).most_common())}
    rows = [_features(words[at - CONTEXT : at], number) for at in range(CONTEXT, len(words))]
    every = Corpus(np.array(rows, np.int32), np.array([number[word] for word in words[CONTEXT:]], np.int32))
    tested = np.arange(len(rows)) // BLOCK % 10 == 9
    return Corpus(*(a[~tested] for a in every)), Corpus(*(a[tested] for a in every)), len(number)


def _features(before: List[str], number: Dict[str, int]) -> List[int]:
    hashes = [zlib.crc32(" ".join(before[-count:]).encode()) % HASHED for count in (2, 3)]
    return [number[word] for word in before] + hashes


def unigram_perplexity(training: Corpus, testing: Corpus, words: int) -> float:
    """Of guessing each word by how often it was seen, plus one."""
    counts = np.bincount(training.word, minlength=words) + 1.0
    return float(np.exp(-np.mean(np.log(counts / counts.sum())[testing.word])))


class Model(NamedTuple):
    """One tower's tensors."""

    features: Any
    word: Any
    loss: Any
    variables: List[Any]


def tower(scope: str, words: int, seed: int) -> Model:
    """Build one tower's copy of the model under a variable scope."""
    features = tf1.placeholder(tf.int32, [None, CONTEXT + 2])
    word = tf1.placeholder(tf.int32, [None])
    with tf1.variable_scope(scope):
        random = [tf1.random_normal_initializer(stddev=0.1, seed=10 * seed + n) for n in range(4)]
        table = tf1.get_variable("words", [words, WIDTH], initializer=random[0], use_resource=True)
        hashed = tf1.get_variable("hashed", [HASHED, WIDTH], initializer=random[1], use_resource=True)
        mix = tf1.get_variable("mix", [(CONTEXT + 2) * WIDTH, HIDDEN], initializer=random[2], use_resource=True)
        kernel = tf1.get_variable("kernel", [HIDDEN, words], initializer=random[3], use_resource=True)
        bias = tf1.get_variable("bias", [words], initializer=tf1.zeros_initializer(), use_resource=True)
    seen = [tf.nn.embedding_lookup(table, features[:, :CONTEXT]), tf.nn.embedding_lookup(hashed, features[:, CONTEXT:])]
    hidden = tf.tanh(tf.matmul(tf.reshape(tf.concat(seen, 1), [-1, (CONTEXT + 2) * WIDTH]), mix))
    logits = tf.matmul(hidden, kernel) + bias
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=word, logits=logits))
    return Model(features, word, loss, [table, hashed, mix, kernel, bias])


class Training:
    """The model on K devices, in a graph and session of its own; ``close`` it."""

    def __init__(self, devices: Any, cpus: int, words: int, args: argparse.Namespace, strategy: Strategy):
        with tf.Graph().as_default() as graph:
            make = chosen_optimizer(args.optimizer or OPTIMIZER, RATE)
            self.optimizer = TowerOptimizer(make, devices, strategy=strategy, update=args.update)
            self.towers, rows = [], []
            for number, device in enumerate(devices):
                with tf1.device(device):
                    model = tower(f"tower{number}", words, args.seed)
                    self.towers.append(model)
                    rows.append(self.optimizer.compute_gradients(model.loss, var_list=model.variables))
            self._step = self.optimizer.apply_gradients(rows)
            config = tf1.ConfigProto(device_count={"CPU": cpus})
            self.session = tf1.Session(graph=graph, config=config)
            self.session.run(tf1.global_variables_initializer())
            self.session.run(self.optimizer.init_op)
            self._saver = tf1.train.Saver(self.towers[0].variables)

    def close(self) -> None:
        """Close the session."""
        self.session.close()

    def step(self, batch: Corpus) -> float:
        """Train on one batch, a share of it on each tower; the mean loss."""
        losses = [model.loss for model in self.towers]
        return float(np.mean(self.session.run([losses, self._step], self._fed(batch))[0], dtype=np.float64))

    def copied_bytes(self, batch: Corpus) -> int:
        """What one more step copies between the devices, as executed."""
        options = tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE, output_partition_graphs=True)
        seen = tf1.RunMetadata()
        self.session.run(self._step, self._fed(batch), options=options, run_metadata=seen)
        return sum(size for _, size in executed_copies(seen).values())

    def saved(self, path: str) -> str:
        """Save tower 0's variables; the checkpoint's path."""
        with self.session.graph.as_default():
            return str(self._saver.save(self.session, path))

    def perplexity(self, corpus: Corpus) -> float:
        """Of tower 0's model."""
        model, total = self.towers[0], 0.0
        for start in range(0, len(corpus.word), 1000):
            part = Corpus(*(a[start : start + 1000] for a in corpus))
            loss = self.session.run(model.loss, {model.features: part.features, model.word: part.word})
            total += float(loss) * len(part.word)
        return float(np.exp(total / len(corpus.word)))

    def _fed(self, batch: Corpus) -> Dict[Any, Any]:
        shares = [np.array_split(a, len(self.towers)) for a in batch]
        fed: Dict[Any, Any] = {}
        for model, features, word in zip(self.towers, *shares):
            fed.update({model.features: features, model.word: word})
        return fed


def batches(corpus: Corpus, epochs: int, size: int, seed: int) -> Iterator[Corpus]:
    """All words once an epoch, in a new order each time, in whole batches."""
    random = np.random.RandomState(seed)
    for _ in range(epochs):
        order = random.permutation(len(corpus.word))
        for start in range(0, len(order) - size + 1, size):
            yield Corpus(*(a[order[start : start + size]] for a in corpus))


def _losses(trained: Training, data: List[Corpus], title: str, terminal: IO[str]) -> List[float]:
    """Of each step, while a bar shows them."""
    losses = []
    with tqdm(data, desc=title, file=terminal, unit="step", mininterval=pause(terminal)) as bar:
        for batch in bar:
            losses.append(trained.step(batch))
            bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
    return losses


def run(args: argparse.Namespace, terminal: IO[str]) -> int:
    """Train on the devices, and a little on the first of them alone; print a report; 0 if it is good."""
    devices, cpus = named_devices(args.devices)
    training, testing, words = load()
    size = BATCH // len(devices) * len(devices)
    strategy = chosen_strategy(args.strategy)
    data = list(batches(training, args.epochs or EPOCHS, size, args.seed))
    with contextlib.closing(Training(devices, cpus, words, args, strategy)) as many:
        losses = _losses(many, data, f"{len(devices)} devices", terminal)
        checkpoint = many.saved(str(args.out / "model"))
        perplexity, unigram = many.perplexity(testing), unigram_perplexity(training, testing, words)
        with many.session.graph.as_default():
            drift = many.optimizer.check_replicas(many.session)
        copied = many.copied_bytes(data[0])
    with contextlib.closing(Training(devices[:1], cpus, words, args, strategy)) as one:
        difference = max(abs(one.step(batch) - loss) for batch, loss in zip(data[:COMPARED], losses))
    with contextlib.closing(Training(devices, cpus, words, args, Strategy(sparse="dense"))) as dense:
        copied_dense = dense.copied_bytes(data[0])
    checks = [
        ("test perplexity", f"{perplexity:.1f}", f"at most {BETTER:g} × the unigrams'", perplexity <= BETTER * unigram),
        ("test perplexity of unigrams", f"{unigram:.1f}", f"{words} different words", True),
        (
            f"{len(devices)} devices and one: loss, any of {COMPARED} steps",
            f"{difference:.1e}",
            f"at most {DIFFERENCE:.0e}",
            difference <= DIFFERENCE,
        ),
        ("any weight between the devices", f"{drift.difference:g}", "exactly 0", drift.difference == 0),
        ("copied in a step, sparse", f"{copied / 1e6:.1f} MB", "as executed", True),
        ("copied in a step, made dense", f"{copied_dense / 1e6:.1f} MB", "as executed", True),
    ]
    width = max(len(label) for label, *_ in checks)
    lines = ["", *(f"{label:{width}}  {value:>9}  ({wanted})" for label, value, wanted, _ in checks)]
    lines += ["", f"checkpoint: {checkpoint}", *(f"FAILED: {label}" for label, *_, good in checks if not good)]
    print("\n".join(lines), file=terminal)
    return 0 if all(good for *_, good in checks) else 1
