"""No room of the house grows without a line in the file of budgets."""

from null.source import tool

lines = tool("lines")


def test_no_room_is_over_its_budget():
    wrong = lines.over(lines.rooms(), lines.budgets(lines.BUDGET.read_text()))
    assert not wrong, "; ".join([*wrong, "shorten it, or run `python tools/lines.py --set` and say why it grew"])


def test_growth_and_new_rooms_are_noticed(tmp_path):
    room = tmp_path / "src" / "refold" / "ops" / "ssd"
    room.mkdir(parents=True)
    (room / "_torch.py").write_text("a\nb\nc\n")
    (tmp_path / "src" / "refold" / "cli.py").write_text("a\n")
    found = lines.rooms(tmp_path)
    assert found == {"src/refold": 1, "src/refold/ops": 3}
    assert lines.over(found, lines.budgets("src/refold 1\nsrc/refold/ops 3\n")) == []
    assert len(lines.over(found, lines.budgets("src/refold/ops 2\n"))) == 2
