"""A small language model on the standard library's English. Its embedding gradients stay sparse from end to end.

The text is ``pydoc_data.topics``, which ``help()`` prints about keywords: half a megabyte in every Python. The model
predicts a word from the four words before it, by embeddings of words and of hashed pairs and triples of words.
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

from ...bench import make_optimizer
from ...formatting import table
from ...graph import executed_copies, tf1
from ...planning import Strategy
from ...training import TowerOptimizer
from .options import chosen_strategy, named_devices
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
COMPARED = 60  # steps that also run on one device
DIFFERENCE = 1e-5  # allowed: of a loss, from training on one device
BETTER = 0.3  # allowed perplexity, as a share of the unigrams'


class Corpus(NamedTuple):
    """Words as numbers: ``features`` (N×6: four words, a hashed pair, a hashed triple), and the next ``word`` (N)."""

    features: np.ndarray
    word: np.ndarray


def load() -> Tuple[Corpus, Corpus, int]:
    """Return the corpus to train on, the corpus to test on, and the number of distinct words."""
    text = "\n".join(topics[name] for name in sorted(topics)).lower()
    words = re.findall(r"[a-z]+|[0-9]+|[^\sa-z0-9]", text)
    number = {word: n for n, (word, _) in enumerate(Counter(words).most_common())}
    rows = [_features(words[at - CONTEXT : at], number) for at in range(CONTEXT, len(words))]
    corpus = Corpus(np.array(rows, np.int32), np.array([number[word] for word in words[CONTEXT:]], np.int32))
    tested = np.arange(len(rows)) // BLOCK % 10 == 9
    return Corpus(*(a[~tested] for a in corpus)), Corpus(*(a[tested] for a in corpus)), len(number)


def _features(context: List[str], number: Dict[str, int]) -> List[int]:
    hashes = [zlib.crc32(" ".join(context[-count:]).encode()) % HASHED for count in (2, 3)]
    return [number[word] for word in context] + hashes


def unigram_perplexity(training: Corpus, testing: Corpus, words: int) -> float:
    """Return the perplexity of predicting each word by its frequency in training, plus one."""
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
        word_table = tf1.get_variable("words", [words, WIDTH], initializer=random[0], use_resource=True)
        hashed_table = tf1.get_variable("hashed", [HASHED, WIDTH], initializer=random[1], use_resource=True)
        mix = tf1.get_variable("mix", [(CONTEXT + 2) * WIDTH, HIDDEN], initializer=random[2], use_resource=True)
        kernel = tf1.get_variable("kernel", [HIDDEN, words], initializer=random[3], use_resource=True)
        bias = tf1.get_variable("bias", [words], initializer=tf1.zeros_initializer(), use_resource=True)
    embedded = tf.concat(
        [
            tf.nn.embedding_lookup(word_table, features[:, :CONTEXT]),
            tf.nn.embedding_lookup(hashed_table, features[:, CONTEXT:]),
        ],
        axis=1,
    )
    hidden = tf.tanh(tf.matmul(tf.reshape(embedded, [-1, (CONTEXT + 2) * WIDTH]), mix))
    logits = tf.matmul(hidden, kernel) + bias
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=word, logits=logits))
    return Model(features, word, loss, [word_table, hashed_table, mix, kernel, bias])


class Training:
    """The model on K devices, in a graph and session of its own; ``close`` it."""

    def __init__(self, devices: Any, cpus: int, words: int, args: argparse.Namespace, strategy: Strategy):
        with tf.Graph().as_default() as graph:
            inner = make_optimizer(args.optimizer or OPTIMIZER, RATE)
            self.optimizer = TowerOptimizer(inner, devices, strategy=strategy, update=args.update)
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
        """Train on one batch, a part of it on each tower; return the mean loss."""
        losses = [model.loss for model in self.towers]
        return float(np.mean(self.session.run([losses, self._step], self._fed(batch))[0], dtype=np.float64))

    def copied_bytes(self, batch: Corpus) -> int:
        """Run one more step; return the bytes that it copies between the devices, as executed."""
        options = tf1.RunOptions(trace_level=tf1.RunOptions.FULL_TRACE, output_partition_graphs=True)
        metadata = tf1.RunMetadata()
        self.session.run(self._step, self._fed(batch), options=options, run_metadata=metadata)
        return sum(size for _, size in executed_copies(metadata).values())

    def save(self, path: str) -> str:
        """Save tower 0's variables; return the checkpoint's path."""
        with self.session.graph.as_default():
            return str(self._saver.save(self.session, path))

    def perplexity(self, corpus: Corpus) -> float:
        """Return the perplexity of tower 0's model on a corpus."""
        model, total = self.towers[0], 0.0
        for start in range(0, len(corpus.word), 1000):
            part = Corpus(*(a[start : start + 1000] for a in corpus))
            loss = self.session.run(model.loss, {model.features: part.features, model.word: part.word})
            total += float(loss) * len(part.word)
        return float(np.exp(total / len(corpus.word)))

    def _fed(self, batch: Corpus) -> Dict[Any, Any]:
        parts = [np.array_split(a, len(self.towers)) for a in batch]
        values: Dict[Any, Any] = {}
        for model, features, word in zip(self.towers, *parts):
            values.update({model.features: features, model.word: word})
        return values


def batches(corpus: Corpus, epochs: int, size: int, seed: int) -> Iterator[Corpus]:
    """Yield whole batches: all words once an epoch, in a new order each time."""
    random = np.random.RandomState(seed)
    for _ in range(epochs):
        order = random.permutation(len(corpus.word))
        for start in range(0, len(order) - size + 1, size):
            yield Corpus(*(a[order[start : start + size]] for a in corpus))


def _losses(trained: Training, data: List[Corpus], title: str, terminal: IO[str]) -> List[float]:
    """Train on all batches while a bar shows the progress; return the loss of each step."""
    losses = []
    with tqdm(data, desc=title, file=terminal, unit="step", mininterval=pause(terminal)) as bar:
        for batch in bar:
            losses.append(trained.step(batch))
            bar.set_postfix_str(f"loss {losses[-1]:.3f}", refresh=False)
    return losses


class Check(NamedTuple):
    """A line of the report: a value, what it should be, and whether it is."""

    label: str
    value: str
    expected: str
    passed: bool = True


def run(args: argparse.Namespace, terminal: IO[str]) -> int:
    """Train on the devices, and a little on the first of them alone; print a report. Return 0 if all checks pass."""
    devices, cpus = named_devices(args.devices)
    training, testing, words = load()
    size = BATCH // len(devices) * len(devices)
    strategy = chosen_strategy(args.strategy)
    data = list(batches(training, args.epochs or EPOCHS, size, args.seed))
    with contextlib.closing(Training(devices, cpus, words, args, strategy)) as many:
        losses = _losses(many, data, f"{len(devices)} devices", terminal)
        checkpoint = many.save(str(args.out / "model"))
        perplexity, unigram = many.perplexity(testing), unigram_perplexity(training, testing, words)
        with many.session.graph.as_default():
            drift = many.optimizer.check_replicas(many.session).difference
        copied = many.copied_bytes(data[0])
    with contextlib.closing(Training(devices[:1], cpus, words, args, strategy)) as one:
        difference = max(abs(one.step(batch) - loss) for batch, loss in zip(data[:COMPARED], losses))
    with contextlib.closing(Training(devices, cpus, words, args, Strategy(sparse="dense"))) as dense:
        copied_dense = dense.copied_bytes(data[0])
    losses_label = f"{len(devices)} devices and one: loss, any of {COMPARED} steps"
    small, better = difference <= DIFFERENCE, perplexity <= BETTER * unigram
    checks = [
        Check("test perplexity", f"{perplexity:.1f}", f"at most {BETTER:g} × the unigrams'", better),
        Check("test perplexity of unigrams", f"{unigram:.1f}", f"{words} different words"),
        Check(losses_label, f"{difference:.1e}", f"at most {DIFFERENCE:.0e}", small),
        Check("any weight between the devices", f"{drift:g}", "exactly 0", drift == 0),
        Check("copied in a step, sparse", f"{copied / 1e6:.1f} MB", "as executed"),
        Check("copied in a step, made dense", f"{copied_dense / 1e6:.1f} MB", "as executed"),
    ]
    lines = ["", table([(check.label, check.value, f"({check.expected})") for check in checks])]
    lines += ["", f"checkpoint: {checkpoint}"]
    lines += [f"FAILED: {check.label}" for check in checks if not check.passed]
    print("\n".join(lines), file=terminal)
    return 0 if all(check.passed for check in checks) else 1
