"""Readers of the standard formats: what they give, and that malformed lines are named."""

from __future__ import annotations

import itertools
import json
import lzma
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from structmax.data import Trees, columns, conllu, glove, parallel, snli, sst, ucr
from structmax.data.folder import (
    DataWarning,
    data_folder,
    find_data,
    find_splits,
    read_lines,
)


@pytest.fixture
def file(tmp_path: Path):
    """Write a file of lines; its path."""

    def write(name: str, *lines: str) -> Path:
        path = tmp_path / name
        content = "".join(line + "\n" for line in lines).encode()
        path.write_bytes(lzma.compress(content) if name.endswith(".xz") else content)
        return path

    return write


def rows(text: str) -> list[str]:
    """Lines of CoNLL-U whose columns are separated by spaces here."""
    lines = [line.strip() for line in text.strip("\n").splitlines()]
    return [line if line.startswith("#") else "\t".join(line.split()) for line in lines]


# -- folders and lines ----------------------------------------------------------------------------


def test_the_data_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRUCTMAX_DATA", str(tmp_path))
    assert data_folder() == tmp_path and data_folder("") == tmp_path
    assert data_folder("given") == Path("given")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.txt.xz").write_bytes(b"")
    assert find_data("set") == tmp_path / "set"
    assert find_data("set/a.txt") == tmp_path / "set" / "a.txt.xz"
    assert find_data(tmp_path / "set", "elsewhere") == tmp_path / "set"
    with pytest.raises(FileNotFoundError, match=r"no b\.txt in .*--data"):
        find_data("b.txt")
    monkeypatch.delenv("STRUCTMAX_DATA")
    assert data_folder().parts[-2:] == ("shared", "data")


def test_a_split_is_all_the_files_named_after_it(tmp_path: Path) -> None:
    names = {
        "train": ["cs_pdt-ud-train-a.conllu.xz", "cs_pdt-ud-train-b.conllu", "latest-train.conllu"],
        "dev": ["eng.testa.conllu", "test-dev.conllu", "x.VALID.conllu"],
        "test": ["eng.testb.conllu", "train-test.conllu"],
    }
    for name in [
        "cs_pdt-ud-train-b.conllu.xz",
        "train.txt",
        "README.conllu",
        *itertools.chain(*names.values()),
    ]:
        (tmp_path / name).touch()
    (tmp_path / "test.conllu").mkdir()
    splits = find_splits(tmp_path, end=".conllu")
    assert [[path.name for path in files] for files in splits] == [*names.values()]
    with pytest.raises(FileNotFoundError, match=r"no \.txt file named dev in"):
        find_splits(tmp_path, end=".txt")


@pytest.mark.parametrize("name", ["a.txt", "a.txt.xz"])
def test_lines_are_numbered(file, name: str) -> None:
    assert list(read_lines(file(name, "one\r", "", "drü"))) == [(1, "one"), (2, ""), (3, "drü")]


def test_broken_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("gut\ndrü\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt:\d+: .*utf-8"):
        list(read_lines(tmp_path / "latin.txt"))
    assert [line for _, line in read_lines(tmp_path / "latin.txt", "latin-1")] == ["gut", "drü"]
    for encoding in ("utf-9", "hex", "a\0b"):
        with pytest.raises(ValueError, match=r"there is no encoding .*Try utf-8"):
            list(read_lines(tmp_path / "latin.txt", encoding))
    whole = lzma.compress(b"some line\n" * 1000)
    (tmp_path / "cut.xz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut\.xz:\d+: "):
        list(read_lines(tmp_path / "cut.xz"))


# -- CoNLL-U --------------------------------------------------------------------------------------

SENTENCE = """
    # sent_id = 1
    1   They   they PRON  _ _ 2 nsubj 2:nsubj|4.1:nsubj _
    2   buy    buy  VERB  _ _ 0 root  0:root            _
    3-4 dunno  _    _     _ _ _ _     _                 _
    3   books  book NOUN  _ _ 2 obj   2:obj             _
    4   and    and  CCONJ _ _ 5 cc    4.1:cc            _
    4.1 sell   sell VERB  _ _ _ _     2:conj|4.2:dep    _
    4.2 it     it   PRON  _ _ _ _     4.1:dep           _
    5   papers _    NOUN  _ _ 2 conj  4.1:obj           _
"""


def test_conllu_reads_words_and_graphs(file) -> None:
    first, second = conllu.read(
        file("a.conllu.xz", *rows(SENTENCE), "", "", *rows("1 Go go VERB _ _ 0 root _ _"))
    )
    assert first.words == ["They", "buy", "books", "and", "papers"]  # no ranges, no empty nodes
    assert first.upos == ["PRON", "VERB", "NOUN", "CCONJ", "NOUN"]
    assert first.heads == [2, 0, 2, 5, 2]
    assert first.deprels == ["nsubj", "root", "obj", "cc", "conj"]
    assert first.enhanced == [
        (2, 1, "nsubj"),
        (2, 1, "conj>nsubj"),  # through 4.1, whose cycle with 4.2 ends nowhere
        (0, 2, "root"),
        (2, 3, "obj"),
        (2, 4, "conj>cc"),
        (2, 5, "conj>obj"),
    ]
    assert second == (["Go"], ["VERB"], [0], ["root"], [])


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("2 b _ X _ _ 1 dep _", "10 columns between tabs, got 9"),
        ("b b _ X _ _ 1 dep _ _", "the id must be a number, .* got 'b'"),
        ("3 b _ X _ _ 1 dep _ _", "expected word 2, got 3"),
        ("2 b _ X _ _ x dep _ _", "the head must be a number, got 'x'"),
        (f"2 b _ X _ _ {'y' * 9999} dep _ _", "the head must be a number, got 'y{40}…'$"),
        ("2 b _ X _ _ 7 dep _ _", "another of 0 to 2, got 7"),
        ("2 b _ X _ _ 2 dep _ _", "another of 0 to 2, got 2"),
        ("2 b _ X _ _ 1 dep dep _", "expected head:label"),
        ("2 b _ X _ _ 1 dep 9:dep _", "a head 9 that is not there"),
    ],
)
def test_conllu_names_malformed_lines(file, line: str, wrong: str) -> None:
    path = file("a.conllu", "# a comment", *rows(f"1 a _ X _ _ 0 root _ _\n{line}"))
    with pytest.raises(ValueError, match=rf"a\.conllu:3: .*{wrong}"):
        conllu.read(path)


# -- columns --------------------------------------------------------------------------------------


def test_columns(file) -> None:
    path = file(
        "eng.train",
        "-DOCSTART- -X- O O",
        "",
        "EU NNP I-NP I-ORG",
        "rejects VBZ I-VP O",
        "",
        "",
        "Blackburn NNP I-NP I-PER",
    )
    assert columns.read(path) == [
        (["EU", "rejects"], ["I-ORG", "O"]),
        (["Blackburn"], ["I-PER"]),
    ]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [("a O O", "expected 2 columns, got 3"), ("a PER", "got 'PER'"), ("a B-", "got 'B-'")],
)
def test_columns_name_malformed_lines(file, line: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=rf"n\.txt:2: .*{wrong}"):
        columns.read(file("n.txt", "a O", line))


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["PER", "LOC"])), max_size=6))
def test_schemes_hold_the_same_spans(chosen) -> None:
    tags: list[str] = []
    for size, label in chosen:  # size 0: a word outside
        tags += ["O"] if not size else [f"B-{label}"] + [f"I-{label}"] * (size - 1)
    spans = columns.spans(tags)
    assert len(spans) == sum(size > 0 for size, _ in chosen)
    for scheme in ("iob1", "iob2", "iobes"):
        converted = columns.convert(tags, scheme)
        assert columns.spans(converted) == spans
        assert columns.convert(converted, "iob2") == tags
    counts = columns.span_counts([tags], [tags])
    assert counts == (len(spans),) * 3 and counts.f1 == float(bool(spans))


def test_span_f1_needs_place_and_label() -> None:
    gold = [["B-PER", "I-PER", "O", "B-LOC"], ["O"]]
    found = [["B-PER", "O", "O", "B-LOC"], ["B-LOC"]]
    counts = columns.span_counts(found, gold)
    assert counts == (1, 3, 2) and counts.f1 == pytest.approx(0.4)
    with pytest.raises(ValueError, match="scheme"):
        columns.convert(["O"], "bio")  # type: ignore[arg-type]


# -- sentiment ------------------------------------------------------------------------------------


def test_sst_settings(file) -> None:
    path = file(
        "t.txt", "(3 (2 It) (4 (2 's) (4 lovely)))", "(2 -LRB-)", "(0 (1 24\\/7) (2 \xa0.))"
    )
    sentences = sst.read(path)
    assert [(s.words, s.label) for s in sentences] == [
        (["It", "'s", "lovely"], 3),
        (["("], 2),
        (["24/7", "\xa0."], 0),
    ]
    assert Trees.from_transitions([s.transitions for s in sentences]).brackets(0) == "(0 (1 2))"
    assert [s.label for s in sst.read(path, binary=True)] == [1, 0]
    assert len(sst.read(path, subtrees=True)) == 9
    assert [s.label for s in sst.read(path, subtrees=True, binary=True)] == [1, 1, 1, 0, 0]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("(3 (2 a) (5 b))", "a label must be 0 to 4, got '5'"),
        (f"(3 (2 a) ({'5' * 9999} b))", "got '5{40}…'$"),
        ("(3 (2 a) (2 b) (2 c))", "3 children, not 2"),
        ("(3 (2 a)", r"1 '\(' never closed"),
        ("(3 (2 a) (2 b)))", "expected the end"),
        ("3 a", "expected .*LABEL"),
        ("", "an empty line"),
    ],
)
def test_sst_names_malformed_lines(file, line: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=rf"t\.txt:2: .*{wrong}"):
        sst.read(file("t.txt", "(2 a)", line))


# -- inference ------------------------------------------------------------------------------------


def test_snli_formats_agree(file) -> None:
    pairs = [("A man eats.", "He eats.", 0), ("A.", "B.", 2), ("It is.", "So it is.", 1)]
    names = ("entailment", "neutral", "contradiction")
    published = [
        {"gold_label": names[label], "sentence1": a, "sentence2": b} for a, b, label in pairs
    ]
    published.insert(1, {"gold_label": "-", "sentence1": "x", "sentence2": "y"})
    files = [
        file("a.jsonl", *map(json.dumps, published)),
        file(
            "a.txt",
            "gold_label\tother\tsentence1\tsentence2",
            *(
                f"{row['gold_label']}\t\t{row['sentence1']}\t{row['sentence2']}"
                for row in published
            ),
        ),
        file("a.tsv.xz", "premise\thypothesis\tlabel", *(f"{a}\t{b}\t{i}" for a, b, i in pairs)),
        file("b.tsv", *(f"{(3, 1, 2)[i]}\t{(3, 1, 2)[i]}\t{a}\t{b}" for a, b, i in pairs)),
    ]
    for path in files:
        assert snli.read(path) == pairs, path


@pytest.mark.parametrize(
    ("name", "lines", "wrong"),
    [
        ("a.jsonl", ["{"], "1: not JSON"),
        ("a.jsonl", ['{"gold_label": "neutral"}'], "1: expected an object"),
        ("a.tsv", ["a\tb"], "1: expected a header"),
        ("a.tsv", ["premise\thypothesis\tlabel", "a\tb\t3"], "2: the label must be of 0, 1, 2"),
        ("a.tsv", ["1\t1\ta\tb", "0\t0\ta\tb"], "2: the label must be of 1, 2, 3, got '0'"),
        ("a.tsv", ["1\t1\ta\tb", f"{'x' * 9999}\t1\ta\tb"], "2: .*got 'x{40}…', '1'$"),
        ("a.tsv", ["1\t1\ta\tb", "1\ta\tb"], "2: expected 4 columns between tabs, got 3"),
    ],
)
def test_snli_names_malformed_lines(file, name: str, lines: list[str], wrong: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}:{wrong}"):
        snli.read(file(name, *lines))


# -- parallel text, vectors -----------------------------------------------------------------------


def test_parallel(file) -> None:
    english, german = (
        file("a.en", "two men .", "a dog"),
        file("a.de.xz", "zwei männer .", "ein hund"),
    )
    assert parallel.read(english, german) == [
        (["two", "men", "."], ["zwei", "männer", "."]),
        (["a", "dog"], ["ein", "hund"]),
    ]
    with pytest.raises(ValueError, match=r"a\.en:2: .*b\.de ends before"):
        parallel.read(english, file("b.de", "zwei"))
    with pytest.raises(ValueError, match=r"b\.de:2: an empty line"):
        parallel.read(english, file("b.de", "zwei", " "))


def test_glove(file) -> None:
    path = file("v.txt.xz", "the 1 2", "café -1e-1 0.5", ", 3 4")
    words, vectors = glove.read(path)
    assert words == ["the", "café", ","] and vectors.dtype == np.float32
    assert np.allclose(vectors, [[1, 2], [-0.1, 0.5], [3, 4]])
    words, vectors = glove.read(path, {",", "not there"})
    assert words == [","] and vectors.tolist() == [[3, 4]]
    assert glove.read(path, set())[1].shape == (0, 2)
    for line, wrong in [("b 1", "expected 2 numbers, got 1"), ("b x 2", "could not convert")]:
        with pytest.raises(ValueError, match=rf"w\.txt:2: {wrong}"):
            glove.read(file("w.txt", "a 1 2", line))
    words, vectors = glove.read(file("spaces.txt", "a 1 2", ". . 3 4", "at name@x 5 6"))
    assert words == ["a", ". .", "at name@x"] and vectors.tolist() == [[1, 2], [3, 4], [5, 6]]
    words, vectors = glove.read(file("fast.vec", "2 3", "a 1 2 3 ", "7 4 5 6 "))  # with a header
    assert words == ["a", "7"] and vectors.tolist() == [[1, 2, 3], [4, 5, 6]]


# -- time series ----------------------------------------------------------------------------------

HEADER = ["# about", "@problemName Two", "@classLabel true a b", "@data"]


def test_ucr_folders(file, tmp_path: Path) -> None:
    file("Two_TRAIN.ts", *HEADER, "1,2,3:4,5,6:b", "1.5,2,-3e1:4,5,6:a")
    file("Two_TEST.ts.xz", *HEADER, "1,2:4,5:a")
    train, test = ucr.read(tmp_path)
    assert train.classes == ["a", "b"] and train.labels.tolist() == [1, 0]
    assert train.series[0].tolist() == [[1, 4], [2, 5], [3, 6]]
    assert test.series[0].shape == (2, 2)
    for path in tmp_path.iterdir():
        path.unlink()
    with pytest.raises(FileNotFoundError, match="NAME_TRAIN"):
        ucr.read(tmp_path)
    x = np.zeros((2, 5, 1))
    np.savez(tmp_path / "Two.npz", X_train=x, y_train=[7, 3], X_test=x, y_test=[3, 3])
    train, test = ucr.read(tmp_path)
    assert train.classes == ["3", "7"] and train.labels.tolist() == [1, 0]
    assert test.labels.tolist() == [0, 0] and test.series[1].shape == (5, 1)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("1,2,x:a", "could not convert"),
        ("1,2,?:a", "could not convert"),
        ("1,2:c", "classes a b at the end, got 'c'"),
        ("1,2:1,2:a", "expected 1 features"),
        ("1,nan:a", "finite"),
        ("1,2", "classes a b at the end"),
    ],
)
def test_ucr_names_malformed_lines(file, line: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=rf"x\.ts:6: .*{wrong}"):
        ucr.read_ts(file("x.ts", *HEADER, "1,2:a", line))


def test_ucr_names_bad_headers(file) -> None:
    with pytest.raises(ValueError, match=r"x\.ts:1: expected @"):
        ucr.read_ts(file("x.ts", "1,2:a"))
    with pytest.raises(ValueError, match=r"x\.ts:2: there is no @classLabel"):
        ucr.read_ts(file("x.ts", "@data", "1,2:a"))
    with pytest.raises(ValueError, match=r"x\.ts: there are no series"):
        ucr.read_ts(file("x.ts", *HEADER))


def test_ucr_splits_agree(file, tmp_path: Path) -> None:
    file("Two_TRAIN.ts", *HEADER, "1,2:a")
    file("Two_TEST.ts", "@classLabel true a c", "@data", "1,2:a")
    with pytest.raises(ValueError, match=r"classes are \['a', 'b'\] and \['a', 'c'\]"):
        ucr.read(tmp_path)


@pytest.mark.parametrize(
    ("arrays", "wrong"),
    [
        ({"X_test": None}, "there is no X_test"),
        ({"X_train": np.zeros((2, 5))}, r"X_train must be \(k, n, d\).*got \(2, 5\)"),
        ({"X_test": np.full((2, 5, 1), np.nan)}, "X_test must be .* finite"),
        ({"y_test": [3]}, r"y_test \(k\), got \(2, 5, 1\) and \(1,\)"),
        ({"y_test": [3, 4]}, "y_test has classes that y_train has not"),
    ],
)
def test_ucr_names_bad_arrays(tmp_path: Path, arrays: dict, wrong: str) -> None:
    x = np.zeros((2, 5, 1))
    given = {"X_train": x, "y_train": [7, 3], "X_test": x, "y_test": [3, 3], **arrays}
    np.savez(tmp_path / "Two.npz", **{k: v for k, v in given.items() if v is not None})
    with pytest.raises(ValueError, match=rf"Two\.npz: .*{wrong}"):
        ucr.read(tmp_path)


def test_lengths_of_trees_are_counted() -> None:
    steps = np.array([[0, 0, 1, 0, 1], [0, 0, 1, -1, -1]])
    assert Trees.from_transitions(steps).lengths.tolist() == [3, 2]
    merges = np.array([[1, 0], [0, -1]])
    assert Trees.from_merges(merges).lengths.tolist() == [3, 2]


def test_a_missing_package_is_named(file, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file("a.conllu", *rows("1 Go go VERB _ _ 0 root _ _"))
    monkeypatch.setitem(sys.modules, "conllu.exceptions", None)
    with pytest.raises(ImportError, match=r"pip install 'structmax\[tasks\]'"):
        conllu.read(path)


def test_a_file_that_asks_for_too_much_memory(file, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file("a.txt.xz", "one")

    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(lzma.LZMAFile, "read1", refuse)
    with pytest.raises(ValueError, match=r"a\.txt\.xz:1: there is not enough memory"):
        list(read_lines(path))


# -- the corpora themselves -----------------------------------------------------------------------


def corpus(name: str) -> Path:
    try:
        return find_data(name)
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.data
def test_counts_of_the_corpora() -> None:
    dev = conllu.read(corpus("ud/UD_English-EWT/en_ewt-ud-dev.conllu"))
    assert len(dev) == 2001 and all(None not in sentence.heads for sentence in dev)
    sentences = sst.read(corpus("sst/dev.txt"))
    assert len(sentences) == 1101 and len(sst.read(corpus("sst/dev.txt"), binary=True)) == 872
    assert len(snli.read(corpus("snli/validation.tsv"))) == 9842
    assert len(snli.read(corpus("snli/train_subset_heldout2k.tsv"))) == 2000
    assert len(parallel.read(corpus("multi30k/val.en"), corpus("multi30k/val.de"))) == 1014
    sizes = {"GunPoint": (50, 150), "ArrowHead": (36, 175), "Trace": (100, 100)}
    for name, size in sizes.items():
        assert tuple(len(split.series) for split in ucr.read(corpus(f"ucr/{name}"))) == size


# -- white space, marks, and numbers that are none ------------------------------------------------


def test_a_byte_order_mark_is_no_text(file) -> None:
    assert list(read_lines(file("a.txt", "\ufeffone"))) == [(1, "one")]
    for encoding in ("UTF-8", "utf8", "u8"):
        assert list(read_lines(file("a.txt", "\ufeffone"), encoding)) == [(1, "one")]
    (only,) = columns.read(file("b.txt", "\ufeff-DOCSTART- -X- O", "", "EU NNP B-ORG"))
    assert only.words == ["EU"]


def test_other_spaces_are_part_of_a_word(file) -> None:
    path = file("a.txt", "10\u00a0000 O", "\u3000 B-X")
    assert columns.read(path)[0].words == ["10\u00a0000", "\u3000"]
    (pair,) = parallel.read(path := file("b.txt", "x\u00a0z y"), path)
    assert pair.source == ["x\u00a0z", "y"]


def test_conllu_is_split_at_tabs_alone(file) -> None:
    fields = ["1", "a  b", "a  b", "NOUN", "_", "_", "0", "root", "_", "_"]
    (sentence,) = conllu.read(file("a.conllu", "\t".join(fields)))
    assert sentence.words == ["a  b"] and sentence.upos == ["NOUN"] and sentence.heads == [0]
    fields[3] = ""
    with pytest.raises(ValueError, match=r"b\.conllu:1: column 4 is empty"):
        conllu.read(file("b.conllu", "\t".join(fields)))


def test_the_first_of_several_tags_counts(file) -> None:
    """As of WNUT-17, whose test file has 297 such words."""
    path = file("a.conll", "New\tB-person,B-location", "York\tI-person,O", "x\tB-a,b", "is\tO")
    with pytest.warns(DataWarning, match=r"a\.conll: words with several tags: 2\. The first"):
        (found,) = columns.read(path)
    assert found.tags == ["B-person", "I-person", "B-a,b", "O"]


def test_underlines_are_no_digits(file) -> None:
    with pytest.raises(ValueError, match=r"a\.txt:1: expected numbers"):
        glove.read(file("a.txt", "word 1_0 2"))


def test_labels_that_disagree(file) -> None:
    with pytest.raises(ValueError, match=r"a\.tsv:2: expected one label twice"):
        snli.read(file("a.tsv", "1\t1\ta\tb", "1\t2\ta\tb"))


def test_letters_do_not_depend_on_batches_before() -> None:
    from structmax.data.words import Vocabulary, facts

    names = facts([["b", "aa", "c"]], least_count=1)
    fresh, used = Vocabulary(names), Vocabulary(names)
    used.collate([["aa", "c"]])
    for one, other in zip(fresh.collate([["b", "aa"]]), used.collate([["b", "aa"]]), strict=True):
        assert (one == other).all()


def test_a_corpus_beside_a_folder_of_its_name(tmp_path, monkeypatch) -> None:
    """As where a run has the name of its corpus."""
    there = tmp_path / "data" / "sst"
    there.mkdir(parents=True)
    (there / "train.txt").write_text("")
    (tmp_path / "sst").mkdir()
    monkeypatch.chdir(tmp_path)
    assert find_data("sst/train.txt", tmp_path / "data") == there / "train.txt"
    for folder, name in [(there, "dev.txt"), (there, "test.txt.xz"), (tmp_path / "sst", "dev.txt")]:
        (folder / name).write_bytes(b"")
    found = [[there / "train.txt"], [there / "dev.txt"], [there / "test.txt.xz"]]
    monkeypatch.setenv("STRUCTMAX_DATA", str(tmp_path / "data"))
    assert find_splits("sst", end=".txt") == find_splits("sst", tmp_path / "data", ".txt") == found
    with pytest.raises(FileNotFoundError, match=r"^there is no \.tsv file named train in sst\.$"):
        find_splits("sst", end=".tsv")
    with pytest.raises(FileNotFoundError, match=r"there is no nothing in .*data\. Say where"):
        find_splits("nothing")
    with pytest.raises(FileNotFoundError, match=r"train\.txt is no folder"):
        find_splits(there / "train.txt")


def test_a_folder_that_is_given_comes_first(tmp_path, monkeypatch) -> None:
    """Before one of the same name in the working directory, which comes before the usual one."""
    for folder in (tmp_path / "sst", tmp_path / "data" / "sst"):
        folder.mkdir(parents=True)
        for split in ("train", "dev", "test"):
            (folder / f"{split}.txt.xz").write_bytes(lzma.compress(b""))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STRUCTMAX_DATA", "data")
    for said, base in (("data", Path("data")), (None, Path()), ("none", Path())):
        assert find_data("sst", said) == base / "sst"
        assert find_data("sst/dev.txt", said) == base / "sst" / "dev.txt.xz"
        splits = find_splits("sst", said, ".txt")
        assert splits[0] == [base / "sst" / "train.txt.xz"] and len(splits) == 3
