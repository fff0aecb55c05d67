"use strict";
// The address keeps its view: browsers pass the fragment on to where a form is redirected.
document.querySelector("form").action += location.hash;
