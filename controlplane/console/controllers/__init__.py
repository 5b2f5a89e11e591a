"""The console's routes, one file per page. Layer: service. They parse and authorise; services decide."""
