import random

from megatron_glue.data.near_duplicates import drop_near_duplicates


def words(count, seed):
    chooser = random.Random(seed)
    return " ".join("".join(chooser.choices("abcdefghij", k=7)) for _ in range(count))


def test_different_texts_are_all_kept_in_order():
    texts = [words(80, seed) for seed in range(50)] + ["short a", "short b"]
    assert drop_near_duplicates(texts) == texts


def test_texts_that_differ_in_digits_or_white_space_count_as_equal():
    assert drop_near_duplicates(["x = 10\n", "x  =  20", "y = 10"]) == ["x = 10\n", "y = 10"]


def test_a_copy_with_small_changes_is_dropped():
    original = words(200, 1)
    changed = original[:700] + " changed " + original[705:]
    other = words(200, 2)
    assert drop_near_duplicates([original, other, changed]) == [original, other]


def test_a_text_cut_out_of_an_earlier_one_is_dropped():
    original = words(400, 1)
    assert drop_near_duplicates([original, original[500:2000]]) == [original]


def test_a_text_that_shares_a_minor_part_is_kept():
    shared = words(30, 1)
    texts = [shared + words(200, 2), words(200, 3) + shared]
    assert drop_near_duplicates(texts) == texts


def test_windows_end_with_their_text():
    """Each pair shares an end and the beginning of its neighbour, both shorter than a window: nothing is a copy."""
    texts = []
    for group in range(50):
        ending, beginning = words(20, group).replace(" ", "")[:30], words(20, 100 + group).replace(" ", "")[:31]
        for side in range(2):
            own = words(20, 1000 + 2 * group + side).replace(" ", "")
            texts += [own[:20] + ending, beginning + own[20:90]]
    assert drop_near_duplicates(texts) == texts


def test_duplicates_are_found_across_block_borders():
    texts = [words(9000, seed) for seed in range(6)]
    assert drop_near_duplicates([*texts, *(text[:-3] + "xyz" for text in texts)]) == texts


def test_nothing_and_empty_texts():
    assert drop_near_duplicates([]) == []
    assert drop_near_duplicates(["", "\n", "a"]) == ["", "a"]
