"""The measurements of one machine, read from the files under bench/results. Imported by report_page.py and report_tables.py."""

import json


class Machine:
    """The measurements of one machine, by kind."""

    def __init__(self, folder):
        self.name = folder.name
        self.folder = folder
        self.about = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
        self.simulated = {}
        simulated = folder.parent / "simulated_facts.json"
        if simulated.is_file():
            for row in json.loads(simulated.read_text(encoding="utf-8"))["rows"]:
                self.simulated[row["length"], row["cache"]] = row["right"], row["nll"]
        self.records = {}
        for path in sorted(folder.glob("*.json")):
            record = json.loads(path.read_text(encoding="utf-8"))
            if "kind" in record:
                self.records.setdefault(record["kind"], []).append(record)

    def of(self, kind):
        return self.records.get(kind, [])

    def file(self, name):
        """Returns the contents of a JSON file that another program wrote, or {} if the file does not exist."""
        path = self.folder / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

    def results(self, kind, **wanted):
        return [r["result"] for r in self.of(kind) if all(r["result"].get(k) == v for k, v in wanted.items())]
