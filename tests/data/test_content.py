"""The hash of what a source holds: equal for equal content, another for any other, for every kind of data."""

import datasets
import pytest

from data.test_images import picture
from fulldepth.data import open_source


def of(data, **options):
    return open_source(data, **options).hash


TEXTS = {
    "where texts end": (["ab", "c"], ["a", "bc"]),
    "their order": (["a", "b"], ["b", "a"]),
    "labels": ([{"text": "a", "label": 0}], [{"text": "a", "label": 1}]),
    "names of classes": ([{"text": "a", "label": "x"}], [{"text": "a", "label": "y"}]),
    "which text it is": ([{"premise": "a", "hypothesis": ""}], [{"premise": "", "hypothesis": "a"}]),
    "responses": ([{"prompt": "a", "response": "b"}], [{"prompt": "a", "response": "c"}]),
}


@pytest.mark.parametrize(("one", "other"), TEXTS.values(), ids=TEXTS)
def test_python_objects(one, other):
    assert of(one) == of(list(one))
    assert of(one) != of(other)


def test_a_column_that_is_not_read_does_not_count():
    rows = [{"text": "a", "id": 1}], [{"text": "a", "id": 8}], [{"text": "b", "id": 1}]
    one, same, other = (of(datasets.Dataset.from_list(each)) for each in rows)
    assert one == same != other


def dataset(*values, feature=None):
    rows = {"image": [picture(value) for value in values], "label": list(range(len(values)))}
    features = datasets.Features({"image": feature or datasets.Image(), "label": datasets.Value("int64")})
    return datasets.Dataset.from_dict(rows, features=features)


def folder_of(root, *values):
    for label, value in enumerate(values):
        (root / str(label)).mkdir(parents=True)
        picture(value).save(root / str(label) / "0.png")
    return root


def test_images_of_every_kind(tmp_path):
    one, same, other = (folder_of(tmp_path / name, *v) for name, v in zip("abc", ((1, 2), (1, 2), (1, 3)), strict=True))
    assert of(one) == of(same) != of(other)
    files = [[{"image": str(folder / str(n) / "0.png")} for n in range(2)] for folder in (one, same, other)]
    assert of(files[0]) == of(files[1]) != of(files[2]), "the files that rows name, not their names"
    assert of([{"image": picture(1)}]) == of([{"image": picture(1)}]) != of([{"image": picture(2)}])
    assert of(dataset(1, 2)) == of(dataset(1, 2)) != of(dataset(1, 3))
    listed = [{"image": (one / "0" / "0.png").read_bytes()}]
    assert of(listed) == of(files[0][:1])


def test_images_that_a_data_set_changes_as_they_are_read():
    """A transform decides the pixels, so they are what is hashed."""
    plain, changed = dataset(1, 2), dataset(1, 2)

    def darker(rows):
        return {**rows, "image": [picture(0) for _ in rows["image"]]}

    changed.set_transform(darker)
    assert of(changed) != of(plain)
    assert of(changed) == of([{"image": picture(0), "label": n} for n in range(2)])
