from rltool.engines.resume import TRANSFER_GROUP
from rltool.weights.control import GROUP


def test_resume_shuts_down_the_group_that_trainers_make():
    assert TRANSFER_GROUP == GROUP
