"""The cache on a real NFS server with two kernel clients; run by `make test-nfs`."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from .lab import Client

pytestmark = pytest.mark.slow
Pair = tuple[Client, Client]
WAIT = """
begin = time.monotonic()
while (entry := find_entry(store, KEY)) is None:
    time.sleep(0.05)
result = time.monotonic() - begin
"""
READ = "result = find_entry(store, KEY).read(np.arange(12)).tokens['input_ids'].tolist()"


def both(pair: Pair, code: str) -> list:
    """Run the same code on both clients at the same time; `index` tells it which one it is."""
    results: list = [None, None]

    def one(index: int) -> None:
        results[index] = pair[index].run(f"index = {index}\n{code}", timeout_s=120)

    threads = [threading.Thread(target=one, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_the_kernel_keeps_a_name_missing_that_was_looked_up(clients: Pair):
    a, b = clients
    a.run("os.makedirs(f'{ROOT}/effect'); open(f'{ROOT}/effect/other', 'w').close()")
    assert b.run("result = os.path.exists(f'{ROOT}/effect/name')") is False
    a.run("open(f'{ROOT}/effect/name', 'w').close()")
    assert b.run("time.sleep(3); result = os.path.exists(f'{ROOT}/effect/name')") is False
    assert b.run("result = sorted(os.listdir(f'{ROOT}/effect'))") == ["name", "other"]


def test_a_waiter_ends_within_a_second_of_the_commit(clients: Pair):
    a, b = clients
    assert b.run("result = find_entry(store, KEY)") is None
    a.run(
        "receipts = [EntryWriter(store, KEY).write_part(i, t, {}) for i, t in enumerate(helpers.make_slices())]"
    )
    names = ("manifest.json", "state.json", "dataset_info.json")
    b.run(f"result = [os.path.exists(f'{{ROOT}}/cache/{{KEY}}/{{name}}') for name in {names!r}]")
    assert b.run("result = find_entry(store, KEY)") is None
    waited: list[float] = []
    waiter = threading.Thread(target=lambda: waited.append(b.run(WAIT)))
    waiter.start()
    begin = a.run(
        "time.sleep(2); EntryWriter(store, KEY).commit(receipts, helpers.RECIPE, {}); result = time.time()"
    )
    waiter.join(30)
    assert begin
    assert waited
    assert waited[0] < 3.5
    assert b.run(READ) == a.run(READ)
    assert b.run("result = [str(p) for p in find_entry(store, KEY).verify()]") == []


def test_a_waiter_sees_an_entry_although_it_looked_before_the_root_was_there(clients: Pair):
    a, b = clients
    b.run("result = [os.path.exists(f'{ROOT}/cache'), os.path.exists(f'{ROOT}/cache/{KEY}/manifest.json')]")
    assert b.run("result = find_entry(store, KEY)") is None
    a.run("helpers.build(store)")
    assert b.run(WAIT) < 1
    assert b.run(READ) == a.run(READ)


def test_of_two_clients_exactly_one_creates_a_name(clients: Pair):
    clients[0].run("store.write('race/ready', b'1')")
    begin = clients[0].run("result = time.time() + 2")
    wins = both(
        clients,
        f"""
result = []
for round in range(40):
    while time.time() < {begin} + round * 0.05:
        pass
    if store.create(f'race/{{round}}', b'%d' % index):
        result.append(round)
""",
    )
    assert sorted(wins[0] + wins[1]) == list(range(40))
    for index in (0, 1):
        contents = clients[1 - index].run(
            f"result = [store.read(f'race/{{n}}').decode() for n in {wins[index]}]"
        )
        assert set(contents) <= {str(index)}


def test_builders_on_both_clients_converge(clients: Pair):
    for _ in range(5):
        manifests = both(
            clients,
            """
made = []
threads = [threading.Thread(target=lambda: made.append(helpers.build(store).to_json().decode())) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
result = made
""",
        )
        assert len(manifests[0] + manifests[1]) == 8
        assert len(set(manifests[0] + manifests[1])) == 1
        for client in clients:
            assert client.run("result = [str(p) for p in find_entry(store, KEY).verify()]") == []
        clients[0].run("collect_garbage(store, older_than_s=0, grace_s=0)")
        assert clients[1].run("result = list_entries(store)") == []


@pytest.mark.timeout(600)  # some forty processes and builds in a guest
def test_a_build_that_was_killed_on_one_client_goes_on_on_the_other(clients: Pair):
    a, b = clients
    root = a.run("result = f'{ROOT}/kill'")
    options = json.dumps({"root": root, "sizes": [5, 0, 7], "options": {}})
    script = Path(__file__).resolve().parent.parent / "cache" / "builder.py"
    points = a.run(
        f"""
import subprocess
done = subprocess.run([sys.executable, {str(script)!r}, 'kill', {options!r}], capture_output=True, text=True)
assert done.returncode == 0, done.stderr
result = int(done.stdout)
""",
        timeout_s=300,
    )
    assert points > 30
    wrong = b.run(
        f"""
result = []
for point in range({points}):
    here = open_store(f'{{ROOT}}/kill/{{point}}')
    kept = set(EntryWriter(here, KEY).receipts())
    helpers.build(here)
    entry = find_entry(here, KEY)
    lengths = sum(name.startswith('part-') for name in here.list(KEY))
    if entry.verify() or entry.num_rows != 12 or lengths > 4:
        result.append([point, sorted(kept), lengths])
""",
        timeout_s=300,
    )
    assert wrong == []


def test_an_entry_held_on_one_client_is_not_removed_on_the_other(clients: Pair):
    a, b = clients
    a.run(
        "helpers.build(store); entry = find_entry(store, KEY); hold = entry.hold('reader'); table = entry.table()"
    )
    b.run("collect_garbage(store, older_than_s=0, max_bytes=0, grace_s=0)")
    assert a.run("result = table.num_rows + len(entry.read(np.arange(12)))") == 24
    assert b.run("result = find_entry(store, KEY) is not None")
    a.run("hold.release(); table = entry = hold = None")  # a name that is deleted stays with the agent
    a.run(
        """
while any(name.startswith('use-') for name in store.list(KEY)):  # the reader's own hold ends in another thread
    time.sleep(0.05)
"""
    )
    b.run("collect_garbage(store, older_than_s=0, grace_s=0)")
    assert a.run("result = list(store.list())") == []


def test_a_root_that_was_removed_and_made_anew_on_the_other_client_is_found(clients: Pair):
    a, b = clients
    a.run("helpers.build(store)")
    assert b.run("entry = find_entry(store, KEY); result = entry.num_rows") == 12
    a.run("import shutil; shutil.rmtree(f'{ROOT}/cache')")
    assert b.run("result = find_entry(store, KEY) is None and list_entries(store) == []")
    a.run("helpers.build(store)")
    assert b.run("result = find_entry(store, KEY).read(np.arange(12)).rows['source_row'].tolist()") == list(
        range(12)
    )


def test_damage_done_on_one_client_is_found_on_the_other(clients: Pair):
    a, b = clients
    a.run(
        """
helpers.build(store)
part = find_entry(store, KEY).manifest.parts[2].name
with open(f'{ROOT}/cache/{KEY}/{part}', 'r+b') as file:
    file.seek(900)
    byte = file.read(1)
    file.seek(900)
    file.write(bytes([byte[0] ^ 1]))
"""
    )
    assert "part-00002" in b.run("result = str(find_entry(store, KEY).verify())")
