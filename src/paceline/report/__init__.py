"""What a person is shown of a plan and of a run: text and one page. Records in, text out."""
