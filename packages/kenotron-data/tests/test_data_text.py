"""Documents come from files in a fixed order, and what is wrong with them is said."""

import pytest

from kenotron_data import builtin_documents, text_documents


def write(folder, **files):
    for name, data in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())


def test_a_file_is_one_document(tmp_path):
    write(tmp_path, book="á text\r\n")
    assert text_documents(tmp_path / "book") == ["á text\r\n"]
    assert text_documents(str(tmp_path / "book")) == ["á text\r\n"]


def test_a_folder_is_read_in_the_order_of_paths(tmp_path):
    write(tmp_path, z_dot_txt="z", a__c_dot_MD="c", a__b__x_dot_py="x", empty_dot_txt="")
    write(tmp_path, picture_dot_png="no", _dot_hidden_dot_txt="no", _dot_git__log_dot_txt="no")
    assert text_documents(tmp_path) == ["x", "c", "z"]
    assert text_documents(tmp_path, suffixes=[".png"]) == ["no"]


def test_a_byte_order_mark_is_dropped(tmp_path):
    write(tmp_path, a_dot_txt=b"\xef\xbb\xbftext")
    assert text_documents(tmp_path) == ["text"]


def test_a_missing_path_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no text at '.*nowhere': the dataset's path must"):
        text_documents(tmp_path / "nowhere")


def test_a_folder_without_text_is_named(tmp_path):
    write(tmp_path, picture_dot_png="no")
    with pytest.raises(ValueError, match=r"folder '.*' holds no text file: files ending in \.c"):
        text_documents(tmp_path)


def test_an_empty_corpus_is_named(tmp_path):
    write(tmp_path, a_dot_txt="", b_dot_txt=b"\xef\xbb\xbf")
    with pytest.raises(ValueError, match=r"the corpus at '.*' is empty: 2 file\(s\), no text"):
        text_documents(tmp_path)


def test_a_file_that_is_no_utf8_is_named_with_the_byte(tmp_path):
    write(tmp_path, a_dot_txt="fine", b_dot_txt=b"\xef\xbb\xbfabc\xff")
    with pytest.raises(ValueError, match=r"b\.txt' is not UTF-8 text: byte 6 is 0xff \(invalid"):
        text_documents(tmp_path)


def test_the_embedded_corpus_is_deterministic_and_large_enough():
    documents = builtin_documents(limit=300_000)
    assert documents == builtin_documents(limit=300_000)
    assert 299_990 <= sum(len(document.encode()) for document in documents) <= 300_000
    assert any("import" in document for document in documents)
    assert builtin_documents(limit=200_000)[0] == documents[0]


def test_the_embedded_corpus_passes_over_what_differs_or_tests(tmp_path):
    write(tmp_path, os_dot_py="os", json__a_dot_py="json", latin_dot_py=b"\xe9", empty_dot_py="")
    write(tmp_path, test__a_dot_py="no", json__tests__a_dot_py="no", idlelib__a_dot_py="no")
    write(tmp_path, note_dot_txt="no", sitecustomize_dot_py="no")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "a.py").write_text("no")
    (tmp_path / "_sysconfigdata_x.py").write_text("no")
    assert builtin_documents(folder=tmp_path) == ["json", "os"]


def test_the_embedded_corpus_is_cut_at_a_whole_character(tmp_path):
    write(tmp_path, a_dot_py="aé", b_dot_py="bbb", c_dot_py="c")
    assert builtin_documents(limit=2, folder=tmp_path) == ["a"]
    assert builtin_documents(limit=5, folder=tmp_path) == ["aé", "bb"]
    assert builtin_documents(limit=6, folder=tmp_path) == ["aé", "bbb"]


def test_a_wrong_limit_is_named():
    with pytest.raises(ValueError, match="a limit of at least 1 byte, not 0"):
        builtin_documents(limit=0)


def test_a_python_without_sources_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no Python sources of the standard library in"):
        builtin_documents(folder=tmp_path / "nowhere")
