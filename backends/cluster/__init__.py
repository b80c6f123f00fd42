"""What does a deployment consist of? Its one file, and what each of its hosts runs."""
