"""Everything that touches Dynamo: loops over time become one node of its graph (`capture`), and then one scan."""
