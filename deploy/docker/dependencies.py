"""Print the dependencies that a pyproject.toml names, one a line: the base ones, and those of the extras given."""

import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]
dependencies = list(project["dependencies"])
for extra in sys.argv[2:]:
    dependencies += project["optional-dependencies"][extra]
print("\n".join(dependencies))
