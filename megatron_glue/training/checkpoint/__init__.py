"""Files that a run can be resumed from: written so that they can be trusted, and read under any layout."""
