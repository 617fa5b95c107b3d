"""Text becomes ids that decode to the same text; nothing is overwritten."""

import numpy as np
import pytest

from spillcliff.errors import UserError
from trainer.data.tokens import Tokens
from trainer.tokenize.corpus import CorpusOptions, tokenize
from trainer.tokenize.tokenizer import END_OF_TEXT, load

TEXT = "def f(x):\n    return x  # naïve café ☕\r\n" * 300


def test_ids_decode_to_the_text_and_files_end_with_an_end_of_text(tmp_path):
    a, b, out = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "out.bin"
    a.write_text(TEXT, newline="", encoding="utf-8")
    b.write_text("second", encoding="utf-8")
    facts = tokenize(CorpusOptions([a, b], out, 300))
    tokens = Tokens.open(out)
    assert facts["tokens"] == len(tokens.ids)
    assert tokens.vocab == facts["vocab"] <= 300
    assert tokens.tokenizer is not None
    text = load(tokens.tokenizer).decode(np.asarray(tokens.ids).tolist(), skip_special_tokens=False)
    assert text == TEXT + END_OF_TEXT + "second" + END_OF_TEXT


def test_a_tokenizer_made_before_gives_the_same_ids(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text(TEXT, newline="", encoding="utf-8")
    tokenize(CorpusOptions([text], tmp_path / "one.bin", 300))
    tokenize(CorpusOptions([text], tmp_path / "two.bin", tokenizer=tmp_path / "one.bin.tokenizer.json"))
    assert np.array_equal(Tokens.open(tmp_path / "one.bin").ids, Tokens.open(tmp_path / "two.bin").ids)


def test_bad_text_is_named_and_leaves_nothing(tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "empty").write_text("")
    (tmp_path / "good").write_text(TEXT, encoding="utf-8")
    for paths, vocab, words in ((["latin"], 300, "UTF-8"), (["empty"], 300, "empty"), (["gone"], 300, "no such file"),
                                (["good"], 20, "257")):
        with pytest.raises(UserError, match=words):
            tokenize(CorpusOptions([tmp_path / p for p in paths], tmp_path / "out.bin", vocab))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "good", "latin"]


def test_a_token_file_is_not_overwritten(tmp_path):
    text, out = tmp_path / "a.txt", tmp_path / "out.bin"
    text.write_text(TEXT, encoding="utf-8")
    out.write_text("precious")
    with pytest.raises(UserError, match="exists"):
        tokenize(CorpusOptions([text], out, 300))
    assert out.read_text() == "precious"
