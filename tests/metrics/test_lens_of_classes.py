import pytest
import torch
from sklearn.metrics import f1_score

from fulldepth.metrics import LensF1, Observation, Readout, Saturation, Setup, macro_f1


def observed(measure, readout):
    """What a measure says of four sequences of one token."""
    everything = torch.ones(4, 1, dtype=torch.bool)
    measure.update(Observation({}, everything, everything, torch.arange(4), readout=lambda: readout))
    return {(row.statistic, row.layer): row.value for row in measure.rows()}


def test_half_of_the_predictions_are_settled_where_exactly_half_are():
    """Two of four positions settle at layer 1, the others at layer 3: the median is layer 1."""
    agrees = torch.tensor([[0, 0, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]).bool()  # layers 0 to 3
    readout = Readout(agrees, agrees, torch.zeros(4, 4), torch.arange(4))
    assert observed(Saturation(Setup(3, 2, num_sequences=4)), readout)["median", None] == 1


def test_classes_that_do_not_occur_are_no_part_of_macro_f1():
    predicted, target = torch.tensor([[0, 1, 1, 3], [0, 1, 3, 3]]), torch.tensor([0, 1, 3, 3])
    agrees = predicted == predicted[-1]
    readout = Readout(agrees, predicted == target, torch.zeros(2, 4), torch.arange(4), predicted, target)
    found = observed(LensF1(Setup(1, 2, num_sequences=4, num_classes=6)), readout)
    for layer, answers in enumerate(predicted):
        assert found["macro", layer] == pytest.approx(f1_score(target, answers, average="macro"))
    assert macro_f1(torch.zeros(3), torch.zeros(3), torch.zeros(3)).isnan()


@pytest.mark.parametrize(("rows", "stated"), [(9, False), (10, True)])
def test_macro_f1_has_an_error_from_ten_rows_of_a_class_on(rows, stated):
    target = torch.tensor([0] * rows + [1] * 12)
    predicted = torch.stack([target, target.roll(3)])
    count = len(target)
    everything = torch.ones(count, 1, dtype=torch.bool)
    readout = Readout(
        predicted == predicted[-1], predicted == target, torch.zeros(2, count), torch.arange(count), predicted, target
    )
    measure = LensF1(Setup(1, 2, num_sequences=count, num_classes=2))
    measure.update(Observation({}, everything, everything, torch.arange(count), readout=lambda: readout))
    assert ("standard_error_of_macro" in {row.statistic for row in measure.rows()}) is stated
