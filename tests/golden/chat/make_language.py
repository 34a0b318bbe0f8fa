# Renders the templates of language.json with Jinja, in an environment as transformers makes it, and writes what each gives
# back into that file: its text, or that it fails. Usage: python3 make_language.py, with jinja2 3.1.6.
import copy
import datetime
import json
import os

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("call"), [], [], body).set_lineno(line)

    def call(self, caller):
        return caller()


def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message):
    raise TemplateError(message)


environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
environment.filters["tojson"] = tojson
environment.globals["raise_exception"] = raise_exception
environment.globals["strftime_now"] = datetime.datetime(2026, 3, 5, 14, 7, 9).strftime

path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "language.json")
language = json.load(open(path))
cases = []
for case in language["cases"]:
    try:
        text = environment.from_string(case["template"]).render(**copy.deepcopy(language["names"]))
        cases.append({"template": case["template"], "text": text})
    except Exception:
        cases.append({"template": case["template"], "fails": True})
json.dump({"names": language["names"], "cases": cases}, open(path, "w"), ensure_ascii=False, indent=0)
