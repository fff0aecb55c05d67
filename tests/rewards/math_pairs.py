"""Labels as public data sets write them, responses as models write them, and what a person who
marks the answer says: (label, response, passes).

Judged by hand. The rule: the response's last answer is marked, not what it thought
on the way; another form of the same value passes; a unit may be left out, but not be a wrong one.
"""

from __future__ import annotations

import datetime
from typing import Any

GSM8K = [
    ("x^2+2x", r"It is \boxed{x^2+2x.}", True),
    ("x^2+2x", "#### x^2+2x.", True),
    ("x^2+2x", "#### x^2+3x.", False),
    ("10", r"\boxed{10_2}", False),
    ("10_2", r"\boxed{10}", True),
    ("10_{10}", r"\boxed{10}", True),
    ("10_2", r"\boxed{2}", False),
    ("10_2", r"\boxed{10_3}", False),
    ("10_2", r"\boxed{10}_{2}", True),
    ("$1A_{16}$", r"It is $1a_{\text{sixteen}}$, so \boxed{26_{10} = 1A_{16}}.", True),
    ("10_2 + 1_2", r"\boxed{10_2 + 1_2}", True),
    ("10_2 + 1_2", r"\boxed{11}", False),
    ("#### 6,000", r"So the total is \boxed{6000}.", True),
    ("#### 6,000", r"So the total is \boxed{6,000}.", True),
    ("#### 6,000", "5 * 1200 = 6000\n#### 6000", True),
    ("#### 6,000", "#### 6,000", True),
    ("#### 6,000", "#### 6", False),
    ("#### 6,000", "The answer is 6,000.", True),
    ("#### 6,000", "The answer is 600.", False),
    ("#### 6,000", "The answer is $6,000.", True),
    ("She has 9+9 = <<9+9=18>>18 eggs.\n#### 18", "She makes $18 a day.", True),
    ("She has 9+9 = <<9+9=18>>18 eggs.\n#### 18", "9 + 9 = 18, so she sells 9.", False),
    ("#### 18", "The final answer is 18 dollars.", True),
    ("#### 18", "**Answer: 18**", True),
    ("#### 18", "**Answer:** 18", True),
    ("#### 18", r"\boxed{18\text{ dollars}}", True),
    ("#### 18", r"\boxed{\$18}", True),
    ("#### 18", r"\boxed{\$18.00}", True),
    ("#### 18", r"\boxed{18.50}", False),
    ("#### -5", r"\boxed{-5}", True),
    ("#### -5", r"\boxed{5}", False),
    ("#### 5", r"\boxed{-5}", False),
    ("#### 0", r"\boxed{0}", True),
    ("#### 0", "", False),
    ("#### 1,234,567", r"\boxed{1234567}", True),
    ("#### 1,234,567", r"\boxed{1{,}234{,}567}", True),
    ("#### 2.5", "It takes 2.5 hours.", True),
    ("#### 2.5", r"\boxed{2\frac{1}{2}}", True),
    ("#### 2.5", r"\boxed{5/2}", True),
    ("#### 75", "So 75% of them passed.", True),
    ("72", "Natalia sold 48/2 = 24 clips in May.\nAltogether 48+24 = 72 clips.", True),
    ("72", "48 + 24 = 72\n\nShe sold 71 in all.", False),
]

SEVERAL_ANSWERS = [
    ("42", r"\boxed{41}, then I correct: \boxed{42}", True),
    ("41", r"\boxed{41}, then I correct: \boxed{42}", False),
    ("5", r"<think>\boxed{5}</think> the answer is 6", False),
    ("6", r"<think>\boxed{5}</think> the answer is 6", True),
    ("6", "<think>the answer is 5</think>\n\n6", True),
    ("6", r"maybe 5</think> so \boxed{6}", True),
    ("5", r"maybe \boxed{5}</think> no, I cannot tell", False),
    ("7", r"<think>a</think>b<think>\boxed{7}</think>\boxed{8}", False),
    ("8", r"<think>a</think>b<think>\boxed{7}</think>\boxed{8}", True),
    ("3", r"\boxed{2}. Check: that is wrong. Again: \boxed{3}", True),
    ("3", r"I will write it in \boxed{}. It is 3, so \boxed{3}.", True),
    ("3", r"\boxed{3} I put the answer in \boxed{}.", True),
    ("9", r"\boxed{8}. On reflection the answer is 9.", True),
    ("8", r"\boxed{8}. This answer is correct.", True),
    ("1, 2", r"$x=\boxed{1}$ or $x=\boxed{2}$", True),
    ("1, 2", r"\boxed{1} and \boxed{2}", True),
    ("1, 2", r"\boxed{2}", False),
    ("10", r"First \boxed{4} apples and then many more pears, which makes \boxed{10}", True),
    ("4", r"#### 3" + "\nsorry:\n#### 4", True),
    ("3", r"#### 3" + "\nsorry:\n#### 4", False),
]

FIGURES = [
    ("AC", r"\boxed{CA}", True),  # the segment, its length, the product, the set of choices
    ("AC", r"\boxed{\overline{CA}}", True),
    ("AC", r"\boxed{AD}", False),
    ("AC", r"\boxed{\overline{AD}}", False),
    ("AC", r"\boxed{\overrightarrow{AC}}", False),
    (r"\overline{AC}", r"\boxed{\overline{CA}}", True),
    (r"\overline{AC}", r"\boxed{\overline{AB}}", False),
    (r"\overline{AC}", "The answer is segment CA.", True),
    (r"$\overline{AC}$", r"\boxed{AC}", True),
    (r"\overrightarrow{AC}", r"\boxed{\overrightarrow{CA}}", False),
    (r"\vec{AC}", r"\boxed{\overrightarrow{AC}}", True),
    (r"\angle ABC", r"\boxed{\angle CBA}", True),
    (r"\angle ABC", r"\boxed{\angle BAC}", False),
    (r"\angle ABC", r"\boxed{\angle ABC}", True),
    ("∠ABC", "The answer is angle CBA.", True),
    ("angle ABC", "#### ∠BCA", False),
    (r"\triangle ABC", r"\boxed{\triangle BCA}", True),
    (r"\triangle ABC", r"\boxed{\triangle ABD}", False),
    (r"\triangle ABC", r"\boxed{\angle ABC}", False),
    ("NO", r"\boxed{ON}", False),
    ("IV", r"\boxed{VI}", False),
    ("Al", r"\boxed{La}", False),
    ("AB + CD", r"\boxed{DC + BA}", True),
    ("x y", r"\boxed{y x}", True),
    (r"\overline{A'C'}", r"\boxed{\overline{C'A'}}", True),
]

FULL_STOPS = [
    ("x^2+25x", "#### x^2+25x.", True),
    ("x^2+25x", "#### $x(x+25)$.", True),
    ("x^2+25x", r"\boxed{x^2+25x.}", True),
    ("x^2+25x", r"\boxed{x^2+26x.}", False),
    ("$x^2+25x$.", r"\boxed{x^2+25x}", True),
    (r"7\pi", r"<answer>7 \pi.</answer>", True),
]

SEPARATORS = [
    ("6 000", r"\boxed{0}", False),
    ("6 000", r"\boxed{6000}", True),
    ("6 000", "The answer is 6 000.", True),
    ("6 000", "The answer is 6000", True),
    ("6000", r"\boxed{6 000}", True),
    ("6000", r"\boxed{6\,000}", True),
    ("6000", "\\boxed{6\u202f000}", True),
    ("6,000", r"\boxed{6}", False),
    ("12,345.67", r"\boxed{12345.67}", True),
    ("1000000", r"\boxed{1\,000\,000}", True),
    ("1000000", "There are 1,000,000 ways.", True),
    ("1_000", r"\boxed{1000}", True),
    ("10'000", r"\boxed{10000}", True),
    ("1,00,000", r"\boxed{100000}", True),
    ("6000", r"\boxed{6,000,000}", False),
]

SCIENTIFIC = [
    ("1e5", r"\boxed{100000}", True),
    ("1e5", r"\boxed{10^5}", True),
    ("1e5", r"\boxed{1}", False),
    ("100000", r"\boxed{1e5}", True),
    ("1e-3", r"\boxed{0.001}", True),
    ("1.5e3", "The answer is 1500.", True),
    ("1.5e3", "The answer is 1.5.", False),
    (r"1.5 \times 10^{3}", r"\boxed{1500}", True),
    ("3e8", r"\boxed{3 \times 10^8}", True),
    ("3e8", r"\boxed{3 \times 10^{8} \text{ m/s}}", True),
    (1e-05, "0.00001", True),
    (1e-05, "1", False),
    (1e-07, r"\boxed{0}", False),
    (1e22, r"\boxed{10^{22}}", True),
    (0.1, r"\boxed{\frac{1}{10}}", True),
]

MIXED_NUMBERS = [
    ("1 1/2", r"\boxed{1.5}", True),
    ("1 1/2", r"\boxed{\frac{3}{2}}", True),
    ("1 1/2", r"\boxed{1\frac{1}{2}}", True),
    ("1 1/2", r"\boxed{\frac{1}{2}}", False),
    ("1 1/2", "The answer is 1 1/2.", True),
    ("3/2", "The answer is 1 1/2.", True),
    ("3/2", "so in the end 1 1/2 cups are left", True),
    (r"2\frac{3}{4}", r"\boxed{\frac{11}{4}}", True),
    (r"2\frac{3}{4}", r"\boxed{\frac{6}{4}}", False),
    ("-1 1/2", r"\boxed{-1.5}", True),
    ("2 3/4 cups", r"\boxed{2.75}", True),
    ("1½", r"\boxed{1.5}", True),
]

FRACTIONS = [
    ("1/2", r"\boxed{\frac{1}{2}}", True),
    ("1/2", r"\boxed{0.5}", True),
    ("1/2", r"\boxed{\dfrac12}", True),
    ("1/2", r"\boxed{2}", False),
    (r"\frac{1}{3}", r"\boxed{0.333333}", True),
    (r"\frac{1}{3}", r"\boxed{0.33}", False),
    (r"\frac{3}{56}", r"\boxed{\dfrac{3}{56}}", True),
    (r"-\frac{1}{2}", r"\boxed{\frac{-1}{2}}", True),
    (r"\frac 59", r"\boxed{5/9}", True),
    (r"\tfrac{14}{3}", r"\boxed{4\frac{2}{3}}", True),
    ("7/8", r"\boxed{\frac{14}{16}}", True),
    (r"\frac{\sqrt{3}}{2}", r"\boxed{\sqrt{3}/2}", True),
    (r"\frac{\sqrt{3}}{2}", r"\boxed{\frac{\sqrt{2}}{2}}", False),
    (0.5, r"\boxed{\frac12}", True),
    ("0.75", "three quarters, so 3/4", True),
]

CONSTANTS = [
    ("pi", r"\boxed{\pi}", True),
    ("pi", r"The area is $\pi$.", True),
    ("pi", r"\boxed{3}", False),
    ("2pi", r"\boxed{2\pi}", True),
    ("2π", r"\boxed{2\pi}", True),
    (r"\pi", r"\boxed{π}", True),
    (r"\frac{\pi}{4}", r"\boxed{\pi/4}", True),
    ("infinity", r"\boxed{\infty}", True),
    (r"\infty", r"\boxed{\infty}", True),
    ("√2", r"\boxed{\sqrt{2}}", True),
    ("sqrt(2)", r"\boxed{\sqrt{2}}", True),
    ("e", r"\boxed{e}", True),
    ("e", r"\boxed{\pi}", False),
]

UNITS = [
    ("18 dollars", r"\boxed{18}", True),
    ("$18", r"\boxed{18}", True),
    ("$18", r"\boxed{18 \text{ dollars}}", True),
    ("18 dollars", r"\boxed{18 \text{ cents}}", False),
    (r"5 \text{ cm}", r"\boxed{5}", True),
    ("5 cm", r"\boxed{5 \text{ cm}}", True),
    ("5 cm", r"\boxed{5\text{ centimeters}}", True),
    ("5 cm", r"\boxed{5 \text{ m}}", False),
    ("5", r"\boxed{5 \text{ meters}}", True),
    ("12 square feet", r"\boxed{12}", True),
    ("12 square feet", r"\boxed{12\text{ ft}^2}", True),
    ("10 apples", "He has 10 apples.", True),
    ("10 apples", "He has 9 apples.", False),
    ("60 mph", r"\boxed{60\text{ miles per hour}}", True),
    (r"45^\circ", r"\boxed{45}", True),
    (r"45^\circ", r"\boxed{45^\circ}", True),
    ("45 degrees", r"\boxed{45^{\circ}}", True),
    (r"45^\circ", r"\boxed{54^\circ}", False),
    ("3 hours", r"\boxed{3 \text{ hours}}", True),
    ("3 hours", r"\boxed{3 \text{ minutes}}", False),
    ("5 kg", "The answer is 5 kilograms.", True),
    ("5kg", r"\boxed{5}", True),
]

PERCENT = [
    ("50%", r"\boxed{50\%}", True),
    ("50%", r"\boxed{50}", True),
    ("50%", r"\boxed{0.5}", True),
    ("50%", r"\boxed{\frac{1}{2}}", True),
    ("50%", r"\boxed{5}", False),
    (r"50\%", "The answer is 50 percent.", True),
    ("0.5", r"\boxed{50\%}", True),
    ("12.5%", r"\boxed{12.5\%}", True),
    ("12.5%", r"\boxed{0.125}", True),
    ("50", r"\boxed{50\%}", True),
    ("50%", "so half, that is 50%.", True),
]

ALGEBRA = [
    ("x^2+1", r"\boxed{1+x^2}", True),
    ("x^2+1", r"\boxed{x^2}", False),
    ("x^2+1", "The answer is $x^2+1$.", True),
    ("(x+1)(x-1)", r"\boxed{x^2-1}", True),
    (r"2\sqrt{3}", r"\boxed{\sqrt{12}}", True),
    (r"2\sqrt{3}", r"\boxed{3\sqrt{2}}", False),
    ("y=2x+3", r"\boxed{y=2x+3}", True),
    ("y=2x+3", r"\boxed{y=3x+2}", False),
    ("x=5", r"\boxed{5}", True),
    ("5", r"\boxed{x=5}", True),
    ("2x", r"\boxed{2x}", True),
    ("2x", r"\boxed{2}", False),
    ("5!", r"\boxed{120}", True),
    (r"\binom{5}{2}", r"\boxed{10}", True),
    ("3^{10}", r"\boxed{59049}", True),
    (r"\log_2 8", r"\boxed{3}", True),
    ("4", r"\boxed{\sqrt{16}}", True),
    ("ab", r"\boxed{ba}", True),
    ("3+4i", r"\boxed{4i+3}", True),
    ("3+4i", r"\boxed{3-4i}", False),
    (r"\boxed{7}", "$7$", True),
    (r"Thus $x = \boxed{7}$.", "$8$", False),
]

SETS_AND_TUPLES = [
    ("(1,2)", r"\boxed{(1,2)}", True),
    ("(1,2)", r"\boxed{(2,1)}", False),
    ("(1, -2)", r"\boxed{\left(1,-2\right)}", True),
    (r"\left(3, \frac{\pi}{2}\right)", r"\boxed{(3, \pi/2)}", True),
    (r"\{1,2,3\}", r"\boxed{\{3,2,1\}}", True),
    (r"\{1,2,3\}", r"\boxed{\{1,2\}}", False),
    ("1, 2", r"\boxed{1,2}", True),
    ("1, 2", r"\boxed{2,1}", True),
    ("[0, 1]", r"\boxed{[0,1]}", True),
    ("[0,1)", r"\boxed{[0,1]}", False),
    (r"(-\infty, 2)", r"\boxed{(-\infty,2)}", True),
    (r"(-\infty, 2)", r"\boxed{(-\infty,2]}", False),
    ("(-infinity, 2)", r"\boxed{(-\infty,2)}", True),
    (r"(-\infty,-1)\cup(1,\infty)", r"\boxed{(-\infty,-1)\cup(1,\infty)}", True),
    (r"x \ge 3", r"\boxed{x \geq 3}", True),
    (r"x \ge 3", r"\boxed{x > 3}", False),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
     r"\boxed{\begin{pmatrix}1&2\\3&4\end{pmatrix}}", True),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
     r"\boxed{\begin{pmatrix}1&2\\4&3\end{pmatrix}}", False),
    ([7], r"\boxed{7}", True),
    (["6 000"], r"\boxed{6000}", True),
]  # fmt: skip

TEXT = [
    ("silent", r"\boxed{listen}", False),
    ("listen", r"\boxed{listen}", True),
    (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", True),
    (r"\text{Evelyn}", r"\boxed{Evelyn}", True),
    (r"\text{Evelyn}", r"\boxed{\text{Briana}}", False),
    ("Monday", "So she was born on Monday.", True),
    ("Monday", "The answer is Tuesday.", False),
    ("even", r"\boxed{\text{Even}}", True),
    ("even", r"\boxed{\text{odd}}", False),
    ("yes", "The answer is yes.", True),
    ("yes", "The answer is no.", False),
    (True, r"\boxed{\text{True}}", True),
    (r"\text{(C)}", r"\boxed{C}", True),
    (r"\text{(C)}", r"\boxed{\text{(C)}}", True),
    ("C", r"\boxed{\text{(C) } 12}", True),
    ("C", "The answer is (C).", True),
    ("C", "The answer is C) 12", True),
    ("C", r"\boxed{B}", False),
    ("C", r"\boxed{C) A and B}", True),
    ("C", r"\boxed{C, a triangle}", True),
    ("C", r"\boxed{C, d = 5}", True),
    ("C", r"\boxed{C: a:b}", True),
    ("C", "The answer is C, because A is wrong.", True),
    ("C", r"\boxed{C,D}", False),
    ("A", r"\boxed{A,B,C,D}", False),
    ("A", "The answer is A, B, C or D.", False),
    ("A", r"\boxed{A) B) C)}", False),
    ("A", r"\boxed{(A)(B)}", False),
    ("A", r"\boxed{(A) or (B)}", False),
    ("A", r"\boxed{A. B. C. D}", False),
    ("A", r"\boxed{Option A, option B}", False),
    ("D", "A, B, C or D", False),
    ("D", "So it is D", True),
    ("D", "It is not D", False),
    ("Monday", "It was certainly not Monday", False),
    ("no", "The answer is yes or no.", False),
    ("no", "The answer is not no.", False),
    ("2", "The answer is not 2.", False),
    ("2", "The answer is 2 or 3.", False),
    ("2", "The answer is 2, 3", False),
    ("1/2", "The answer is 1/2 or 0.5.", True),
    ("B", "Answer: B", True),
    ("no solution", r"\boxed{\text{no solution}}", True),
    ("no solution", r"\boxed{\text{No solution.}}", True),
    ("no solution", r"\boxed{0}", False),
    ("the ellipse", r"\boxed{\text{ellipse}}", True),
    ("Paris", "The capital of France is Paris.", True),
    ("Paris", "The capital of France is London.", False),
    ("five", r"\boxed{5}", True),
    ("5", "The answer is five.", True),
]

LETTERS = [
    *(
        (word, form.format(word), True)
        for word in (
            *("Tom", "Sam", "Ann", "Bob", "Amy", "Max", "Al", "Ed", "Jo Lee", "sun", "Mon", "cat"),
            *("ice", "owl", "sky", "left", "tan", "USA", "ACB", "IV", "ab", "xy", "mgh", "AB", "x"),
        )
        for form in (
            *("The answer is {}.", r"\boxed{{{}}}", "Answer: {}", "So it is {}", "**{}**"),
            *("#### {}", "<answer>{}</answer>", r"The result is \boxed{{\text{{{}}}}}."),
        )
    ),
    *(
        (label, rf"\boxed{{{answer}}}", False)
        for label, answer in (
            *(("May", "Amy"), ("Nia", "Ian"), ("Nan", "Ann"), ("Ave", "Eva"), ("Al", "La")),
            *(("cat", "act"), ("CAT", "ACT"), ("ACB", "BCA"), ("ABC", "CAB"), ("ABCD", "BADC")),
            *(("IV", "VI"), ("on", "no"), ("left", "felt"), ("tan", "ant"), ("dog", "god")),
            *(("Tom", "Thomas"), ("Tom Lee", "Moe Tell"), ("Max", "Min"), ("Eat", "Tea")),
            *(
                ("ab", "2ab"),
                ("ab", "ac"),
                ("x", "2x"),
                ("xy", "x+y"),
                ("2ab", "ab"),
                ("ab", "cab"),
            ),
        )
    ),
    ("GOD", "#### DOG", False),
    (r"The pet is \boxed{dog}", "#### god", False),
    ("ABC", "The answer is CAB", False),
    ("Tom", "The answer is Thomas.", False),
    ("Tom", "It is not Tom", False),
    ("Tom", "It is Bob or Tom", False),
    *(
        (label, rf"\boxed{{{answer}}}", True)
        for label, answer in (
            *(("ab", "ba"), ("xy", "yx"), ("abc", "bca"), ("xyz", "zyx"), ("mgh", "ghm")),
            *(("ab", r"a \cdot b"), ("AB", "BA")),
            *(("$abc$", "cab"), ("pi", r"\pi"), ("alpha", r"\alpha"), ("A and C", "A, C")),
            *(("x", "y = x"), ("sin x", r"\sin x"), ("Pi", r"\pi")),
        )
    ),
    ("ab", "The answer is 2 ab.", False),
    ("ab", "So it is x + ab", False),
    ("x", "The answer is cos x", False),
    ("x", "The answer is not x", False),
    ("ab", "The answer is $ba$.", True),
]

DATES = [
    ("2017-03-05", "2017", False),
    ("2017-03-05", r"\boxed{2017}", False),
    ("2017-03-05", "The answer is 2017-03-05.", True),
    ("2017-03-05", "It was on March 5, 2017.", True),
    ("2017-03-05", "It was on 6 March 2017.", False),
    ("March 5, 2017", r"\boxed{\text{5 March 2017}}", True),
    ("June 20", r"\boxed{\text{June 20}}", True),
    ("June 20", r"\boxed{\text{June 21}}", False),
    ("05/29/1994", "The date is 05/29/1994.", True),
    ("05/29/1994", "The answer is 05/28/1994.", False),
    (datetime.date(2017, 3, 5), "The answer is March 5th, 2017.", True),
    ("10:45", r"\boxed{10:45}", True),
    ("10:45", r"\boxed{10:54}", False),
    ("3:30 PM", "The answer is 3:30 pm.", True),
]

AS_MODELS_WRITE = [
    ("Two", r"\boxed{2}", True),
    ("3,4", r"\boxed{3, 4}", True),
    (r"1,3,5", r"The answer is 1, 3 and 5.", True),
    ("0.08", r"\boxed{8\%}", True),
    ("0.08", r"\boxed{.08}", True),
    ("11\\sqrt{2}", r"\boxed{11\sqrt2}", True),
    ("\\frac{9}{7}", r"Thus, $x = \boxed{\frac97}$.", True),
    ("(0,9)\\cup(9,36)", r"\boxed{(0,9) \cup (9,36)}", True),
    ("1 \\pm \\sqrt{19}", r"\boxed{1+\sqrt{19}, 1-\sqrt{19}}", True),
    ("1 \\pm \\sqrt{19}", r"\boxed{1 \pm \sqrt{19}}", True),
    ("6 - 5i", r"\boxed{6-5i}", True),
    ("13 , 18", r"\boxed{13}", False),
    ("-\\frac{35}{9}", r"\boxed{-\dfrac{35}{9}}", True),
    ("x^3+3x-6", r"\boxed{x^3 + 3x - 6}", True),
    ("90^\\circ", r"The angle is $90$ degrees.", True),
    ("5.4 \\text{ cents}", r"\boxed{5.4}", True),
    ("10080", r"So there are 10,080 ways", True),
    ("2400", r"... = 2,400 cubic inches", True),
    ("\\$32,\\!348", r"\boxed{32348}", True),
    ("\\$32,\\!348", r"\boxed{\$32,\!348}", True),
    ("1,\\!048,\\!576", r"\boxed{1048576}", True),
    ("2516_8", r"\boxed{2516_8}", True),
    ("4_5", r"\boxed{4}", True),
    ("\\text{Navin}", "After all this, the answer is Navin.", True),
    ("p - q", r"\boxed{p-q}", True),
    ("y^4-2y^3+7y^2+y-5", r"\boxed{y^4 - 2y^3 + 7y^2 + y - 5}", True),
    ("(6,31,-1)", r"\boxed{(6, 31, -1)}", True),
    ("(6,31,-1)", r"\boxed{(6, 31, 1)}", False),
    (
        "\\begin{pmatrix} -2 \\\\ -14 \\\\ -7 \\end{pmatrix}",
        r"\boxed{\begin{pmatrix}-2\\-14\\-7\end{pmatrix}}",
        True,
    ),
    ("70 \\sqrt{2}", r"\boxed{98.99}", False),
    ("8:00", r"\boxed{8:00}", True),
    ("even", "The function is even.", True),
    ("E", r"\boxed{\text{(E)}}", True),
    ("14", "So the answer is: $\\boxed{14}$ apples. I hope it is correct.", True),
    ("14", "The answer is 14, not 15.", True),
    ("24", "4! = 24", True),
    ("24", r"\boxed{4!}", True),
    ("5", r"\boxed{5 \text{ or } 6}", False),
    ("2/3", "The probability is 2/3", True),
    ("2/3", r"The probability is $\frac{2}{3} \approx 0.667$", True),
    ("0.667", r"\boxed{\frac{2}{3}}", False),
    ("3.14", r"\boxed{\pi}", False),
    ("7", r"\boxed{7.0}", True),
    ("7.0", r"\boxed{7}", True),
    ("10^6", r"\boxed{1000000}", True),
    ("2^{10}", r"\boxed{1024}", True),
    ("x>5", r"\boxed{(5,\infty)}", True),
    ("x \\in [1,2]", r"\boxed{[1,2]}", True),
    ("20 minutes", r"\boxed{\frac{1}{3}\text{ hour}}", False),
    ("1 hour", r"\boxed{1\text{ hr}}", True),
    ("not possible", r"\boxed{\text{impossible}}", False),
    ("A and C", r"\boxed{A, C}", True),
    ("AC", r"\boxed{AC}", True),
    ("12 - 3x", r"\boxed{3(4-x)}", True),
    ("12 cm^2", r"\boxed{12\pi}", False),
    ("12\\pi", r"\boxed{12\pi \text{ cm}^2}", True),
    ("12\\pi", r"\boxed{12\pi}", True),
    ("12 pi", r"\boxed{12\pi}", True),
    ("1/0", r"\boxed{1}", False),
    ("9.11", r"9.11 is less than 9.9, so \boxed{9.9}", False),
    ("-3", "The answer is −3.", True),
    ("-3", "x = -3", True),
    ("1:2", r"\boxed{1:2}", True),
    ("1:2", r"\boxed{\frac{1}{2}}", True),
    ("17", "Answer: 17\n\nExplanation: 10 + 7.", True),
    ("17", "**Final Answer**: The final answer is $17$. #", True),
    ("300", "Total cost = $300.", True),
    ("300", "Total cost = $100 + $200 = $300", True),
    ("25", "<answer>25</answer>", True),
    ("25", "<answer> 25 </answer>", True),
    ("25", "<think>30</think><answer>25</answer>", True),
    ("1.5", "1,5", True),
]

HEDGED = [
    ("7", "3 + 4 = 7. This answer is correct.", True),
    ("7", "The answer is found by adding 3 and 4: 3 + 4 = 7.", True),
    ("7", r"The answer is $3 + 4 = 7$.", True),
    ("x+y", "The answer is $x + y$.", True),
    ("x+y", "The answer is $x - y$.", False),
    ("yes", "The answer is certainly yes.", True),
    ("7", "<answer></answer> 7", True),
    ("7", r"<answer>\boxed{7}</answer>", True),
    ("7", r"\boxed{6} <answer>7</answer>", True),
]

SCALES = [
    ("100 million", r"\boxed{100000000}", True),
    ("100 million", r"\boxed{100}", False),
    ("2.5 million dollars", r"\boxed{\$2,500,000}", True),
    ("3 thousand", "The answer is 3,000.", True),
    ("24", r"\boxed{2 \text{ dozen}}", True),
    ("#### 5", r"\boxed{5 \text{ million}}", False),
]

QUOTED = [
    ("12", "The answer is `12`.", True),
    ("12", "First 3, then `12`", True),
    ("3", "First 3, then `12`", False),
    ("3", 'First 3, then "12"', False),
    ("3", "The answer is `12`, not 3", False),
    ("12", "The answer is **``12``**", True),
    ("12", "#### '12'", True),
    ("12", "\\boxed{`12`}", True),
    ('"12"', "<answer>“12”</answer>", True),
    ("1/2", "Answer: `0.5`", True),
    ("B", "Answer: `B`", True),
    ("Paris", 'The answer is "Paris".', True),
    ("-7", "The answer is negative 7.", True),
    ("7", "The answer is negative 7.", False),
    ("-1/2", r"It is negative \frac{1}{2}.", True),
    ("negative 3.5", "The result is minus 3.5", True),
    ("6", "The answer is 6, minus 1 for fees", True),
    ("7", "Take the non-negative 7", True),
    ("7", "Take the non-negative $7$", True),
    *(
        (label, f"The answer is {answer}.", passes)
        for answer in (
            *("negative $7$", r"negative \(7\)", "negative **7**", "negative: 7", "negative `7`"),
            *(
                "minus $7$",
                "**minus** 7",
                r"minus \(7\)",
                "minus «7»",
                r"negative \$7",
                "negative (7)",
            ),
            *(r"\text{negative } 7", "negative seven", "negative _7_"),
        )
        for label, passes in (("-7", True), ("7", False))
    ),
    ("-1/2", r"\boxed{\text{minus } \frac{1}{2}}", True),
    (r"-\sqrt{2}", r"It is negative $\sqrt{2}$", True),
    (r"\sqrt{2}", r"It is negative $\sqrt{2}$", False),
    ("-x-1", "The answer is negative $x+1$", True),
    ("-7", "I had 99, but it is -$7$", True),
    ("7", "I had 99, but it is -$7$", False),
    ("3", "It is negative $-3$, so 3", True),
    ("6", "The answer is 10 minus 4, which is 6", False),
    ("4", "I don't take 3, it's 4", True),
    *(
        ("12", f"First 3, then {quoted}", True)
        for quoted in (
            *(
                "‘12’",
                "«12»",
                "« 12 »",
                "„12“",
                "»12«",
                "”12”",
                "‹12›",
                "「12」",
                "『12』",
                "＂12＂",
            ),
            *('"`12`"', "“‘12’”", "```12```", "``12''", "_`12`_", "*12*", "__12__", '**"12"**'),
        )
    ),
    ("even", "The answer is ‘even’.", True),
    ("odd", "The answer is ‘even’.", False),
    ("12", "The result is 「12」", True),
    ("5", "It's 4‘, no, 3 * 4 * 5 is too much: it’s 5", True),
    ("60", "It is 3 *4* 5, that is 60", True),
    ("10’000", "It is “10’000”", True),
    ("f'(x)+g'(x)", r"\boxed{f'(x)+g'(x)}", True),
]

IN_PARENTHESES = [
    *(
        ("A", text, True)
        for text in ("The correct option is (A).", "Therefore (A)", "A)", "**A)**")
    ),
    *(
        ("A", text, True)
        for text in ("So the correct choice is **(A)**.", "Because B is wrong: (A)")
    ),
    *(("A", text, False) for text in ("not (A)", "It isn't (A).", "It isn't A.", "B (A)", "f(A)")),
    *(
        ("A", text, False)
        for text in ("The correct option is (B).", "Option (B) (A)", "rather than (A)")
    ),
    ("D", "(A) (B) (C) (D)", False),
    ("D", "(A), (B), (C), (D)", False),
    ("B", "(A) or (B)", False),
    ("B", "both (A) and (B)", False),
    ("B", "A) B)", False),
    ("Paris", "It is (Paris).", True),
    ("Paris", "Lyon (Paris).", False),
    ("Paris", "It's not (Paris).", False),
    ("Paris", "It isn't Paris.", False),
]

CHOICES_IN_CHINESE = [
    *(
        (label, text, label == "B")
        for label in "AB"
        for text in ("答案：B", "选B", "正确答案是（B）。")
    ),
    *(("B", "A不对，所以选B。", True), ("A", "A不对，所以选B。", False), ("B", "不选B", False)),
    *(("B", "DNA含有B族", False), ("B", "答案是B12", False), ("B", "答案是 B", True)),
]

CHOICES_WITH_THEIR_TEXT = [
    *(
        (label, text, True)
        for label, text in (
            *(("A", "A. 5 apples"), ("A", "(A) 5 apples"), ("A", "A) 5 apples"), ("B", "B. False")),
            *(("A", "**A. 5 apples**"), ("A", "**A.** 5 apples"), ("B", "Option B. 12 km")),
            *(("B", "Answer: B. 12 km"), ("B", "The correct choice is **(B)** 12 km.")),
            ("B", "So the correct choice is option B: 12 km"),
            ("B", "It is 3 + 9 = 12 km.\n\n(B) 12 km"),
            ("B", "A. 5\nB. 12 km\nC. 3\n\nIt is 12 km.\n(B) 12 km."),
            *(("A", "A. Not enough information"), ("B", "(B) is correct."), ("C", "C) A and B")),
            *(("D", "D. All of the above"), ("B", r"$\textbf{(B)}$ 12 km")),
        )
    ),
    *(
        (label, text, False)
        for label, text in (
            *(
                ("A", "A cat sat."),
                ("A", "A 5 apples"),
                ("A", "A: 5 apples"),
                ("A", "A. M. Turing"),
            ),
            *(("A", "A. B. C. are wrong"), ("A", "(A) is wrong."), ("A", "A. 5 apples is wrong.")),
            *(("B", "A. 5 apples\nB. 6 apples"), ("D", "A. 1\n\nB. 2\n\nC. 3\n\nD. 4")),
            *(("D", "A. 1: too small\nBecause 2 > 1.\nD. 4"), ("A", "A. 1  B. 2  C. 3")),
            *(
                ("A", "(A) 1; (B) 2"),
                ("A", "A. 1, B. 2"),
                ("I", "I think so"),
                ("A", "A, 5 apples"),
            ),
            *(("A", "B. 5 apples"), ("A", "(A) or (B) 5 apples"), ("A", "It is not A. 5 apples")),
        )
    ),
]

WITHOUT_SPACES = [
    *(
        ("12", text, True)
        for text in (
            *(
                "我认为答案是12。",
                "答案：12",
                "答案：12。",
                "The result：12",
                "步骤 3：所以答案是12。",
            ),
            *(
                "共有12个苹果。",
                "一共12元",
                "约12米",
                "答えは12です。",
                "정답은12입니다.",
                "คำตอบคือ12",
            ),
            *(
                "答案：<b>12</b>",
                "<b>12</b>",
                "<td>5</td><td>12</td>",
                "答案是**12**。",
                "=>12",
                "->12",
            ),
            *("total:12", "Step 3, total:12", "|12|", "|total|12|", "result—12", "答案——12"),
            *("(12)", "The result is (12)", "[12]", "{12}", "≈12", "x≈12", "→12", ":12", "+12"),
            *(
                "结果是１２。",
                "The result is １２",
                "结果为 １２",
                "الناتج ١٢",
                "结果=１２",
                "是１２．０",
            ),
            *(
                "小明有5个，又买了7个，一共12个。",
                "第3题的答案是12",
                "共12个（每盒 A4 纸）",
                "共12个[1]。",
            ),
            *("面积是12cm²。", "共12km", "价格是¥12", "价格￥12", "3加9得12", "结果是12（H2O）"),
            *("Answer：12", "最终答案，12", "A：3。B：12", "步骤3：得12。步骤4：完成。"),
            *("共12!", "答案是12.0。", "答案是24/2。", "答案是12，见第3步。"),
        )
    ),
    *(
        ("12", text, False)
        for text in (
            *("a12", "C12", "COVID-12", "v2.12", "版本v2.12", "#12", "№12", "H12O", "<12>", "x_12"),
            *(
                "时间是3:12。",
                "时间是12:30。",
                "3点12分",
                "3小时12分",
                "5月12日",
                "2024年12月3日",
                "3元12分",
            ),
            *(
                "范围是3-12。",
                "3至12个",
                "3到12",
                "3～12",
                "比是3:12",
                "比是3：12",
                "答案是3、12",
                "5或12",
            ),
            *(
                "不是12。",
                "并非12",
                "结果是-12。",
                "结果是−12",
                "结果是－12",
                "答案是12万",
                "共12亿个",
                "约12千个",
            ),
            *(
                "5分之12",
                "是12分之5",
                "结果是12²",
                "结果是12x。",
                "结果是12+x",
                "是2×12",
                "3乘以12",
                "是12^2",
            ),
            *(
                "(12) apples are red",
                "[12] shows it.",
                "As in [12].",
                "见http://a.b/12",
                "步骤12：无解",
                "图12",
            ),
            *(
                "x<sup>12</sup>",
                "12.12.12版",
                "共1,2,12",
                "答案是√12",
                "|-12|",
                "2024-05-12",
                "是12/05/2024",
            ),
            *(
                "结果是12。所以是13。",
                "12个中有 3 个",
                "&#12;",
                "答案是 3，共12$x$",
                "是12月3日",
                "是120",
            ),
        )
    ),
    *(("-12", text, True) for text in ("结果是-12。", "结果是−12", "结果是－12", "答案：-12")),
    ("12000", "一共12,000元。", True),
    ("12000", "一共１２，０００元", True),
    ("12000", "一共1.2万元", True),
    ("1200000000", "共12亿", True),
    ("1/2", "概率是1/2。", True),
    ("1", "概率是1/2。", False),
    ("0.5", "概率是0.5", True),
    ("5", "概率是0.5", False),
    ("12%", "占12％。", True),
    ("5", "It has 5 boxes (3 per box)", True),
    ("5", "The limit is 5 as x->0.", True),
    ("5", "It costs 5 dollars (3)", True),
    ("3", "The answer for part（2）is 3.", True),
    ("5", "The price is 5 (see [3]).", True),
    ("2", "1. Add.\n2. Done.", True),
    ("0", "It grows as x->0.", False),
    ("2", "It is f(2)", False),
    ("3", "步骤 3：所以答案是12。", False),
]

KNOWN_DISAGREEMENTS = [
    ("128 , 64", r"\boxed{64,128}", True),  # reads as the number 64128
    (r"0.\overline{3}", r"\boxed{\frac13}", True),  # the bar is not read
    ("14", "The answer is not 13 but 14.", True),  # the first quantity after "answer is"
    ("2 m", r"\boxed{200 \text{ cm}}", True),  # units are compared, not converted
    ("2ab", r"\boxed{2ba}", True),  # letters after a number are a unit
    ("a b c", r"\boxed{abc}", True),  # "a" is an article
]

PAIRS: list[tuple[Any, str, bool]] = [
    *GSM8K, *SEVERAL_ANSWERS, *FIGURES, *FULL_STOPS,
    *SEPARATORS, *SCIENTIFIC, *MIXED_NUMBERS, *FRACTIONS, *CONSTANTS,
    *UNITS, *PERCENT, *ALGEBRA, *SETS_AND_TUPLES, *TEXT, *LETTERS, *DATES, *AS_MODELS_WRITE,
    *HEDGED, *SCALES, *QUOTED, *IN_PARENTHESES, *CHOICES_WITH_THEIR_TEXT, *CHOICES_IN_CHINESE,
    *WITHOUT_SPACES,
    *KNOWN_DISAGREEMENTS,
]  # fmt: skip
